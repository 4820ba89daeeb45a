"""Reads traces with the software that they are made for, and prints what it finds as JSON."""

import collections
import json
import sys


def perfetto(path):
    """Counts what Perfetto's published schema finds in a trace."""
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

    trace = schema.Trace()
    with open(path, "rb") as file:
        trace.ParseFromString(file.read())
    event = schema.TrackEvent
    names, annotations, strings, tracks, processes, labels = {}, {}, {}, {}, {}, {}
    kinds, texts = collections.Counter(), collections.Counter()
    flows = collections.defaultdict(set)
    slices, depth, sequences = [], collections.Counter(), set()
    counters = collections.defaultdict(list)
    unknown = 0
    for packet in trace.packet:
        sequence = packet.trusted_packet_sequence_id
        if packet.sequence_flags & packet.SEQ_INCREMENTAL_STATE_CLEARED:
            assert sequence not in sequences, "a sequence begins once"
            sequences.add(sequence)
        for name in packet.interned_data.event_names:
            names[sequence, name.iid] = name.name
        for name in packet.interned_data.debug_annotation_names:
            annotations[sequence, name.iid] = name.name
        for text in packet.interned_data.debug_annotation_string_values:
            strings[sequence, text.iid] = text.str.decode()
        if packet.HasField("track_descriptor"):
            descriptor = packet.track_descriptor
            tracks[descriptor.uuid] = descriptor
            if descriptor.HasField("process"):
                processes[descriptor.uuid] = descriptor.process.process_name
                labels[descriptor.process.process_name] = list(descriptor.process.process_labels)
        if not packet.HasField("track_event"):
            continue
        it = packet.track_event
        unknown += it.track_uuid not in tracks
        kinds[event.Type.Name(it.type)] += 1
        if it.type == event.TYPE_COUNTER:
            descriptor = tracks[it.track_uuid]
            assert descriptor.HasField("counter"), descriptor
            counters[descriptor.name].append(it.counter_value)
            continue
        depth[it.track_uuid] += (it.type == event.TYPE_SLICE_BEGIN) - (it.type == event.TYPE_SLICE_END)
        if it.type != event.TYPE_SLICE_END:
            name = it.name or names[sequence, it.name_iid]
            texts[name] += 1
            for flow in it.flow_ids:
                flows[flow].add(sequence)
            facts = {}
            for one in it.debug_annotations:
                value = one.WhichOneof("value")
                fact = getattr(one, value)
                fact = strings[sequence, fact] if value == "string_value_iid" else fact
                facts[one.name or annotations[sequence, one.name_iid]] = fact
            slices.append((packet.timestamp, name, it.track_uuid, facts))
    ranks = collections.Counter(len(of) for of in flows.values())
    reductions = [facts for _, name, _, facts in slices if name.startswith("AllReduce") and "waiting_us" in facts]
    return {
        "kinds": kinds,
        "names": texts,
        "tracks": len(tracks),
        "processes": sorted(processes.values()),
        "unknown_tracks": unknown,
        "unfinished": sum(depth.values()),
        "flows_by_ranks": ranks,
        "reduction": max(reductions, key=lambda facts: facts["waiting_us"], default=None),
        "product": next((facts for _, _, _, facts in slices if facts.get("k") == 4096), None),
        "labels": labels,
        "counters": {name: [len(values), min(values), max(values)] for name, values in counters.items()},
        "bandwidths": [facts["bandwidth_gbps"] for facts in reductions],
    }


def hta(folder):
    """The breakdowns of HolisticTraceAnalysis."""
    import logging

    logging.disable(logging.CRITICAL)
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_dir=folder)
    time = analysis.get_temporal_breakdown(visualize=False)
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    kinds, _ = analysis.get_gpu_kernel_breakdown(visualize=False, include_memory_kernels=True)
    return {
        "time": time.to_dict("records"),
        "overlap": overlap.to_dict("records"),
        "kinds": sorted(kinds["kernel_type"]),
    }


found = {"perfetto": perfetto, "hta": hta}[sys.argv[1]](sys.argv[2])
print("\n" + json.dumps(found, default=float))
