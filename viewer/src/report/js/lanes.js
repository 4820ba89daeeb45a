// The swim lanes: what each rank did in the last minute before the hang, one lane a rank. Culprits
// are on top; the lanes of a group are folded into that of its first rank. A canvas draws only the
// visible lanes, so a thousand ranks cost nothing.

/** Height of a lane, without and with its row of Python functions. */
const LANE_HEIGHTS = [26, 36];
const AXIS = 22;
const LABEL = 150;
/** The shortest time that the width shows, in microseconds. */
const CLOSEST = 200;

/** The bars of a lane, unpacked when the lane is first drawn. */
function barsOf(lane) {
  if (lane.unpacked) return lane.unpacked;
  const count = lane.bars.length / 6;
  const bars = { begin: new Float64Array(count), length: new Float64Array(count), waited: new Float64Array(count), name: new Int32Array(count), count: new Int32Array(count), seq: new Float64Array(count) };
  let at = 0;
  for (let i = 0; i < count; i++) {
    const [since, length, waited, name, number, seq] = lane.bars.slice(6 * i, 6 * i + 6);
    at += since;
    bars.begin[i] = at;
    bars.length[i] = length;
    bars.waited[i] = waited;
    bars.name[i] = name;
    bars.count[i] = number;
    bars.seq[i] = seq;
  }
  return (lane.unpacked = bars);
}

const usText = (us) => (us < 1000 ? `${Math.round(us)} µs` : us < 1e6 ? `${(us / 1000).toFixed(us < 1e4 ? 2 : 1)} ms` : `${(us / 1e6).toFixed(2)} s`);

/** How far the clocks of the nodes can be trusted; empty for one node. */
function clocksText(clocks) {
  if (!clocks) return "";
  const { nodes, refused, median_us: median, p99_us: p99, corrected_us: corrected } = clocks;
  const parts = [];
  if (median !== null) {
    const worst = nodes - refused.length > 2 ? " on the worst node" : "";
    const shown = (us) => (us < 1 ? "less than 1 µs" : usText(us));
    parts.push(`The clocks of ${plural(nodes - refused.length, "node")} are aligned on the ends of common collectives, which then differ by ${shown(median)} in the median and ${shown(p99)} in 99 of 100 cases${worst}; realtime clocks were up to ${usText(corrected)} off.`);
  }
  if (refused.length) {
    const names = refused.length > 3 ? `${refused.slice(0, 3).join(", ")} and ${refused.length - 3} more` : refused.join(", ");
    parts.push(`Not aligned: ${names}. No collective is common to ${refused.length > 1 ? "these nodes" : "this node"} and the others, so the lanes marked with “clock?” may be shifted.`);
  }
  return parts.join(" ");
}

/** How many operations are missing in which lanes; empty if there are none. */
function lostText(lanes) {
  const cut = lanes.filter(({ lost }) => lost);
  if (!cut.length) return "";
  const ranks = cut.map(({ rank }) => rank);
  const count = cut.reduce((sum, { lost }) => sum + lost, 0);
  return `${plural(count, "operation")} of ${plural(ranks.length, "rank")} ${count > 1 ? "are" : "is"} missing (${ranksText(ranks.flatMap((rank) => [rank, rank]), 5)}): white space in the lanes marked with “gaps” may have been busy.`;
}

function buildLanes() {
  const section = byId("lanes");
  const L = D.lanes;
  if (!L) return;
  section.hidden = false;
  const hasPython = L.names.some(({ kind }) => kind === "python");
  const LANE = LANE_HEIGHTS[hasPython ? 1 : 0];
  const LANES = new Map(L.lanes.map((lane) => [lane.rank, lane]));
  const state = { from: 0, to: L.span_us, open: new Set(), needle: "", matches: null, row: 0, at: L.span_us / 2, drag: null };

  const canvas = el("canvas", { "aria-hidden": "true" });
  const pad = el("div", { class: "lanes-pad" });
  const box = el("div", { id: "lanes-box", class: "lanes", tabindex: "0", role: "application", "aria-label": "Operations of the ranks over time. Left and right move, plus and minus zoom, up and down choose a rank, Enter opens a group, n and p go to the next and previous operation." }, pad, canvas);
  const detail = el("div", { id: "lanes-detail", class: "detail", role: "status", "aria-live": "polite" });
  const search = el("input", { id: "lanes-search", type: "search", placeholder: "Search operations", "aria-label": "Search operations", autocomplete: "off", spellcheck: "false" });
  const found = el("span", { id: "lanes-found", role: "status", "aria-live": "polite", class: "muted" });
  const button = (id, text, onclick) => el("button", { type: "button", class: "small", id, onclick }, text);
  const zoomIn = button("lanes-in", "Zoom in", () => zoomAt((state.from + state.to) / 2, 0.5));
  const zoomOut = button("lanes-out", "Zoom out", () => zoomAt((state.from + state.to) / 2, 2));
  const reset = button("lanes-reset", "All", () => showSpan(0, L.span_us));
  const toHang = L.behind_us === null ? null : button("lanes-hang", "The hang", () => goTo(L.behind_us, 6e5));
  const key = (name, text) => el("span", { class: "lanes-key" }, el("i", { class: `lane-${name}` }), text);
  const lost = lostText(L.lanes);
  const behind = L.behind_us === null ? "" : ` At time 0, the dashed line, the first rank${CULPRITS.length ? ` (${ranksText(CULPRITS, 3)})` : ""} fell behind.`;
  section.append(
    ...heading("lanes-title", "Before the hang", `One lane a rank, ${timeText(Math.round(L.span_us / 1000))} in all: communication above, kernels and copies below${hasPython ? ", sampled Python functions at the bottom" : ""}. A hatched bar waits for its peers; white space is time on the host.${behind} Drag to zoom; Ctrl and the wheel zoom as well.`),
    el("div", { class: "tools" }, zoomIn, zoomOut, reset, toHang, search, found),
    el("p", { id: "lanes-clocks", class: L.clocks?.refused.length ? "lanes-clocks warning" : "lanes-clocks", hidden: !L.clocks }, clocksText(L.clocks)),
    el("p", { id: "lanes-lost", class: "lanes-clocks warning", hidden: !lost }, lost),
    el("div", { class: "lanes-keys" }, key("communication", "collective, send or receive"), key("waiting", "waits for its peers"), key("host", "host call"), key("compute", "kernel, product or graph"), key("copy", "copy"), hasPython ? key("python", "Python function, sampled: a colour each") : null),
    box,
    detail,
  );

  /** What is wrong with the lanes of ranks, behind the label of their row. */
  const marksOf = (ranks) => {
    const has = (what) => ranks.some((rank) => LANES.get(rank)[what]);
    return (has("unaligned") ? " · clock?" : "") + (has("lost") ? " · gaps" : "");
  };
  /** The rows: a culprit, the first rank of a group, or a rank of an open group. */
  function rows() {
    const list = [];
    const groups = GROUPS.map((group, index) => ({ group, index })).sort((a, b) => (b.group.colour === "culprit") - (a.group.colour === "culprit"));
    for (const { group, index } of groups) {
      const ranks = [];
      for (let i = 0; i < group.runs.length; i += 2) {
        for (let rank = group.runs[i]; rank <= group.runs[i + 1]; rank++) {
          if (LANES.has(rank) && (!view.filter || containsRank(view.filter, rank))) ranks.push(rank);
        }
      }
      const culprits = ranks.filter((rank) => containsRank(CULPRITS, rank));
      const others = ranks.filter((rank) => !containsRank(CULPRITS, rank));
      for (const rank of culprits) list.push({ rank, culprit: true, marks: marksOf([rank]) });
      const isOpen = state.open.has(index);
      const shown = isOpen ? others : others.slice(0, 1);
      shown.forEach((rank, at) => list.push({ rank, index: at === 0 && others.length > 1 ? index : null, more: at === 0 ? others.length - 1 : 0, marks: marksOf(isOpen ? [rank] : others) }));
    }
    const grouped = new Set(list.map(({ rank }) => rank));
    // Ranks without a dump are in no group.
    for (const { rank } of L.lanes) {
      if (!grouped.has(rank) && !groupOf(rank)) list.push({ rank, culprit: containsRank(CULPRITS, rank), more: 0, marks: marksOf([rank]) });
    }
    return list.sort((a, b) => Boolean(b.culprit) - Boolean(a.culprit));
  }
  let list = rows();

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  let palette = null;
  function colours() {
    return (palette ??= { communication: colour("lane-communication"), host: colour("lane-host"), compute: colour("lane-compute"), copy: colour("lane-copy"), ink: colour("ink"), muted: colour("muted"), line: colour("line"), card: colour("card"), soft: colour("soft"), hot: colour("hot"), hit: colour("hit"), focus: colour("focus") });
  }
  /** Diagonal lines in the colour of a bar. */
  function hatched(context, base, paper) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = tile.getContext("2d");
    pen.fillStyle = paper;
    pen.fillRect(0, 0, 6, 6);
    pen.strokeStyle = base;
    pen.lineWidth = 1.6;
    for (const shift of [-6, 0, 6]) {
      pen.beginPath();
      pen.moveTo(shift, 6);
      pen.lineTo(shift + 6, 0);
      pen.stroke();
    }
    return context.createPattern(tile, "repeat");
  }

  const width = () => Math.max(50, box.clientWidth - LABEL);
  const xOf = (us) => LABEL + ((us - state.from) / (state.to - state.from)) * width();
  const usAt = (x) => state.from + ((x - LABEL) / width()) * (state.to - state.from);

  /** First bar that may be visible: bars are ordered by begin, and few overlap. */
  function firstVisible(bars, from) {
    let low = 0;
    let high = bars.begin.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (bars.begin[middle] < from) low = middle + 1;
      else high = middle;
    }
    // A long bar before it may reach into the view.
    for (let i = low - 1, steps = 0; i >= 0 && steps < 2000; i--, steps++) {
      if (bars.begin[i] + bars.length[i] >= from) low = i;
    }
    return low;
  }

  /** The row of a kind in its lane, and the place of each row: top and height. */
  const rowOf = (kind) => (kind === "python" ? 2 : kind === "compute" || kind === "copy" ? 1 : 0);
  const ROWS = [[3, 10], [14, 9], [25, 9]];
  /** The shade of a Python function: neighbours in the list of names differ. */
  const shade = (name) => `hsl(${(name * 137) % 360} 35% 60%)`;

  function drawLane(pen, { rank }, y, hatch) {
    const bars = barsOf(LANES.get(rank));
    const c = colours();
    for (let i = firstVisible(bars, state.from); i < bars.begin.length && bars.begin[i] < state.to; i++) {
      const { kind } = L.names[bars.name[i]];
      const left = Math.max(LABEL, xOf(bars.begin[i]));
      const right = Math.min(box.clientWidth, xOf(bars.begin[i] + bars.length[i]));
      if (right < LABEL) continue;
      const wide = Math.max(0.7, right - left);
      const [down, high] = ROWS[rowOf(kind)];
      const top = y + down;
      pen.globalAlpha = state.matches && !state.matches.has(bars.name[i]) ? 0.2 : bars.count[i] > 1 ? 0.75 : 1;
      pen.fillStyle = kind === "python" ? shade(bars.name[i]) : c[kind];
      pen.fillRect(left, top, wide, high);
      if (kind === "python" && wide > 40) {
        pen.globalAlpha = 1;
        pen.fillStyle = "#000";
        pen.font = "8.5px system-ui, sans-serif";
        const { text } = L.names[bars.name[i]];
        const fits = Math.floor((text.length * (wide - 6)) / pen.measureText(text).width);
        pen.fillText(fits < text.length ? `${text.slice(0, Math.max(0, fits - 1))}…` : text, left + 3, top + 7.5);
      }
      const waited = Math.min(wide, Math.max(0, xOf(bars.begin[i] + bars.waited[i]) - left));
      if (waited >= 1) {
        pen.fillStyle = hatch;
        pen.fillRect(left, top, waited, high);
        pen.strokeStyle = c[kind];
        pen.lineWidth = 1;
        if (waited > 3) pen.strokeRect(left + 0.5, top + 0.5, waited - 1, high - 1);
      }
    }
    pen.globalAlpha = 1;
  }

  function drawAxis(pen, wide) {
    const c = colours();
    const span = state.to - state.from;
    const step = [1, 2, 5].flatMap((n) => Array.from({ length: 9 }, (_, power) => n * 10 ** power)).sort((a, b) => a - b).find((us) => (us / span) * wide > 90) ?? span;
    pen.fillStyle = c.muted;
    pen.strokeStyle = c.line;
    pen.font = "11px system-ui, sans-serif";
    const zero = L.behind_us ?? L.span_us;
    for (let us = zero + Math.ceil((state.from - zero) / step) * step; us <= state.to; us += step) {
      const x = Math.round(xOf(us)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, AXIS - 6);
      pen.lineTo(x, canvas.clientHeight);
      pen.stroke();
      const since = us - zero;
      pen.fillText(since === 0 ? "0" : `${since < 0 ? "−" : "+"}${usText(Math.abs(since))}`, x + 3, 12);
    }
  }

  function label(pen, row, y) {
    const c = colours();
    pen.fillStyle = row.culprit ? c.hot : c.ink;
    pen.font = `${row.culprit ? "700" : "500"} 12px system-ui, sans-serif`;
    const sign = row.index === undefined || row.index === null ? "" : state.open.has(row.index) ? "▾ " : "▸ ";
    const more = row.more > 0 && !state.open.has(row.index) ? ` and ${row.more} more` : "";
    pen.fillText(`${sign}rank ${row.rank}${more}${row.marks}`, 8, y + 17, LABEL - 14);
  }

  let asked = false;
  function draw() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      paint();
    });
  }

  function paint() {
    const c = colours();
    const ratio = devicePixelRatio || 1;
    const [wide, high] = [box.clientWidth, box.clientHeight];
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(high * ratio);
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${high}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.fillStyle = c.card;
    pen.fillRect(0, 0, wide, high);
    drawAxis(pen, width());
    const hatch = hatched(pen, c.communication, c.card);
    const first = Math.max(0, Math.floor(box.scrollTop / LANE));
    const last = Math.min(list.length, Math.ceil((box.scrollTop + high - AXIS) / LANE));
    pen.save();
    pen.beginPath();
    pen.rect(0, AXIS, wide, high - AXIS);
    pen.clip();
    for (let at = first; at < last; at++) {
      const y = AXIS + at * LANE - box.scrollTop;
      pen.strokeStyle = c.line;
      pen.beginPath();
      pen.moveTo(0, y + LANE - 0.5);
      pen.lineTo(wide, y + LANE - 0.5);
      pen.stroke();
      pen.save();
      pen.beginPath();
      pen.rect(LABEL, y, wide - LABEL, LANE);
      pen.clip();
      drawLane(pen, list[at], y, hatch);
      pen.restore();
      label(pen, list[at], y);
      if (at === state.row && document.activeElement === box) {
        pen.strokeStyle = c.focus;
        pen.strokeRect(1.5, y + 1.5, wide - 3, LANE - 3);
      }
    }
    pen.restore();
    if (L.behind_us !== null && L.behind_us >= state.from && L.behind_us <= state.to) {
      const x = Math.round(xOf(L.behind_us)) + 0.5;
      pen.strokeStyle = c.hot;
      pen.setLineDash([4, 3]);
      pen.beginPath();
      pen.moveTo(x, AXIS - 6);
      pen.lineTo(x, high);
      pen.stroke();
      pen.setLineDash([]);
    }
    if (state.drag) {
      const [a, b] = [Math.min(state.drag.x, state.drag.to), Math.max(state.drag.x, state.drag.to)];
      pen.globalAlpha = 0.2;
      pen.fillStyle = c.focus;
      pen.fillRect(a, AXIS, b - a, high);
      pen.globalAlpha = 1;
    }
    reset.disabled = state.from === 0 && state.to === L.span_us;
  }

  function arrange() {
    list = rows();
    state.row = Math.min(state.row, Math.max(0, list.length - 1));
    const high = AXIS + list.length * LANE + 2;
    pad.style.height = `${high}px`;
    box.style.height = `${Math.min(high + 2, 420)}px`;
    draw();
  }

  function showSpan(from, to) {
    const span = Math.min(L.span_us, Math.max(CLOSEST, to - from));
    state.from = Math.min(Math.max(0, from), L.span_us - span);
    state.to = state.from + span;
    state.at = (state.from + state.to) / 2;
    draw();
  }
  /** Centers a time, from which the keys n and p go on. */
  function goTo(us, half) {
    showSpan(us - half, us + half);
    state.at = us;
  }
  function zoomAt(us, factor) {
    showSpan(us - (us - state.from) * factor, us + (state.to - us) * factor);
  }

  /** The bar at a place, else the gap there. */
  function at(row, us, line) {
    const bars = barsOf(LANES.get(row.rank));
    const slack = (2 / width()) * (state.to - state.from);
    let [best, before, after] = [-1, 0, L.span_us];
    for (let i = firstVisible(bars, state.from); i < bars.begin.length && bars.begin[i] <= state.to; i++) {
      const end = bars.begin[i] + bars.length[i];
      if (rowOf(L.names[bars.name[i]].kind) === line && us >= bars.begin[i] - slack && us <= end + slack && (best < 0 || bars.length[i] <= bars.length[best])) best = i;
      if (end <= us) before = Math.max(before, end);
      if (bars.begin[i] >= us) after = Math.min(after, bars.begin[i]);
    }
    return { best, before, after, bars };
  }

  function describeBar(row, bars, i) {
    const { text, kind, partial } = L.names[bars.name[i]];
    const count = bars.count[i];
    const when = clock(bars.begin[i]);
    if (kind === "python") return `rank ${row.rank}: ${count > 1 ? `${plural(count, "function")}, mostly ` : ""}in ${text} for ${usText(bars.length[i])} from ${when}`;
    const parts = [`rank ${row.rank}: ${count > 1 ? `${plural(count, "operation")}, the longest ${text}` : text}`];
    if (bars.seq[i]) parts.push(`number ${bars.seq[i]}`);
    parts.push(count === 0 ? `pending since ${when}` : `${usText(bars.length[i])} from ${when}`);
    if (bars.waited[i] && count > 0) parts.push(`${partial ? "at least " : ""}${usText(bars.waited[i])} of it waiting for peers`);
    if (partial) parts.push("other members have no timeline");
    if (LANES.get(row.rank).unaligned) parts.push("its clock is not aligned");
    return parts.join(", ");
  }
  const clock = (us) => `${new Date(L.from_ms + us / 1000).toISOString().slice(11, 23)} UTC`;

  const rowAt = (y) => (y < AXIS ? -1 : Math.floor((y - AXIS + box.scrollTop) / LANE));
  function hover(event) {
    const bounds = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - bounds.left, event.clientY - bounds.top];
    if (state.drag) {
      state.drag.to = Math.max(LABEL, Math.min(bounds.width, x));
      draw();
      return;
    }
    const row = list[rowAt(y)];
    if (!row || x < LABEL) return;
    const inside = (y - AXIS + box.scrollTop) % LANE;
    const line = inside < 13 ? 0 : inside < 24 || !hasPython ? 1 : 2;
    const us = usAt(x);
    const { best, before, after, bars } = at(row, us, line);
    detail.textContent = best >= 0 ? describeBar(row, bars, best) : `rank ${row.rank}: ${line === 2 ? "no sample" : "no operation"} for ${usText(after - before)} from ${clock(before)}`;
  }
  canvas.addEventListener("mousemove", hover);
  canvas.addEventListener("mousedown", (event) => {
    const bounds = canvas.getBoundingClientRect();
    const x = event.clientX - bounds.left;
    if (x >= LABEL) state.drag = { x, to: x };
  });
  addEventListener("mouseup", (event) => {
    const drag = state.drag;
    state.drag = null;
    if (!drag) return;
    const [a, b] = [Math.min(drag.x, drag.to), Math.max(drag.x, drag.to)];
    if (b - a > 4) showSpan(usAt(a), usAt(b));
    else draw();
    event.stopPropagation();
  });
  canvas.addEventListener("click", (event) => {
    const bounds = canvas.getBoundingClientRect();
    const at = rowAt(event.clientY - bounds.top);
    if (!list[at]) return;
    state.row = at;
    if (event.clientX - bounds.left < LABEL) toggle(list[at]);
    draw();
  });
  canvas.addEventListener("dblclick", (event) => {
    const bounds = canvas.getBoundingClientRect();
    if (event.clientX - bounds.left >= LABEL) zoomAt(usAt(event.clientX - bounds.left), 0.25);
  });
  box.addEventListener(
    "wheel",
    (event) => {
      const bounds = canvas.getBoundingClientRect();
      if (event.ctrlKey || event.metaKey) zoomAt(usAt(event.clientX - bounds.left), event.deltaY > 0 ? 1.25 : 0.8);
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) pan((event.deltaX || event.deltaY) / width());
      else return;
      event.preventDefault();
    },
    { passive: false },
  );
  const pan = (share) => showSpan(state.from + share * (state.to - state.from), state.to + share * (state.to - state.from));

  function toggle(row) {
    if (row.index === undefined || row.index === null) openRank(row.rank);
    else if (state.open.has(row.index)) state.open.delete(row.index);
    else state.open.add(row.index);
    arrange();
  }

  /** Goes to the next or previous operation of the chosen lane, or match of the search. */
  function step(direction) {
    const row = list[state.row];
    if (!row) return;
    const bars = barsOf(LANES.get(row.rank));
    const fits = (i) => !state.matches || state.matches.has(bars.name[i]);
    let best = -1;
    for (let i = 0; i < bars.begin.length; i++) {
      if (!fits(i)) continue;
      if (direction > 0 && bars.begin[i] > state.at) {
        best = i;
        break;
      }
      if (direction < 0 && bars.begin[i] < state.at) best = i;
    }
    if (best < 0) return;
    goTo(bars.begin[best], (state.to - state.from) / 2);
    detail.textContent = describeBar(row, bars, best);
  }

  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const keys = {
      ArrowLeft: () => pan(-0.2),
      ArrowRight: () => pan(0.2),
      ArrowUp: () => choose(state.row - 1),
      ArrowDown: () => choose(state.row + 1),
      "+": () => zoomAt((state.from + state.to) / 2, 0.5),
      "=": () => zoomAt((state.from + state.to) / 2, 0.5),
      "-": () => zoomAt((state.from + state.to) / 2, 2),
      Home: () => showSpan(0, L.span_us),
      n: () => step(1),
      p: () => step(-1),
      Enter: () => list[state.row] && toggle(list[state.row]),
    };
    if (!(event.key in keys)) return;
    keys[event.key]();
    event.preventDefault();
  });
  function choose(row) {
    state.row = Math.min(Math.max(0, row), list.length - 1);
    const y = state.row * LANE;
    if (y < box.scrollTop) box.scrollTop = y;
    if (y + LANE > box.scrollTop + box.clientHeight - AXIS) box.scrollTop = y + LANE - box.clientHeight + AXIS;
    if (list[state.row]) detail.textContent = `rank ${list[state.row].rank}${containsRank(CULPRITS, list[state.row].rank) ? ", culprit" : ""}`;
    draw();
  }

  search.addEventListener("input", () => {
    state.needle = search.value.trim().toLowerCase();
    state.matches = null;
    if (state.needle) {
      state.matches = new Set(L.names.flatMap((name, i) => (name.text.toLowerCase().includes(state.needle) ? [i] : [])));
      let count = 0;
      for (const { rank } of list) {
        const bars = barsOf(LANES.get(rank));
        for (let i = 0; i < bars.name.length; i++) if (state.matches.has(bars.name[i])) count += 1;
      }
      found.textContent = count ? `${plural(count, "bar")} in the shown lanes` : "nothing found";
    } else found.textContent = "";
    draw();
  });

  box.addEventListener("scroll", draw);
  box.addEventListener("focus", draw);
  box.addEventListener("blur", draw);
  addEventListener("resize", draw);
  new MutationObserver(() => {
    palette = null;
    draw();
  }).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    palette = null;
    draw();
  });
  listeners.push((changes) => {
    if ("filter" in changes) arrange();
  });
  arrange();
}
