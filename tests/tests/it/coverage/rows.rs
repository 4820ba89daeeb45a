//! Every function of the hook's table is called once, on libraries that have only these functions,
//! and leaves in the record the entries of `rows.txt`. gloo's are methods of PyTorch, which its own
//! tests call.

use std::collections::{BTreeMap, BTreeSet};

use xpu_timer_proto::{
    ring::lane::COPY_KINDS,
    v1::{OpKind, OpStatus, Operation},
};

use super::*;

/// A line of `rows.txt`.
struct Row {
    names: Vec<String>,
    arguments: String,
    /// The entries of the record after the call; entries that are only counted, such as a kernel,
    /// come first.
    left: String,
}

/// A library of a family: its soname, how the functions begin that it has, and what `rows.c` adds
/// to it.
type Library = (&'static str, &'static [&'static str], &'static str);

const FAMILIES: [&[Library]; 7] = [
    &[
        ("libcuda.so.1", &["cu"], "-DDEVICE=cu"),
        ("libcudart.so.13", &["cuda", "__cuda"], ""),
        ("libnccl.so.2", &["nccl"], "-DCOLLECTIVES=nccl"),
        ("libcublas.so.13", &["cublas"], "-DBLAS=cublas"),
        ("libcublasLt.so.13", &["cublasLt"], "-DBLAS=cublas"),
    ],
    &[
        ("libamdhip64.so.7", &["hip"], "-DDEVICE=hip"),
        ("libhipblas.so.3", &["hipblas"], "-DBLAS=hipblas"),
        ("libhipblaslt.so.1", &["hipblasLt"], "-DBLAS=hipblas"),
    ],
    &[
        ("libmcruntime.so", &["mc"], "-DDEVICE=mc"),
        ("libmccl.so", &["mccl"], "-DCOLLECTIVES=mccl"),
        ("libmcblas.so", &["mcblas"], "-DBLAS=mcblas"),
        ("libmcblasLt.so", &["mcblasLt"], "-DBLAS=mcblas"),
    ],
    &[("libascendcl.so", &[], ""), ("libhccl.so", &["Hccl"], "")],
    &[("libcnrt.so", &[], ""), ("libcncl.so", &["cncl"], "")],
    &[("libmpi.so.40", MPI, "-DMPI")],
    &[("libmpi_abi.so.0", MPI, "-DMPI -DSTANDARD")],
];

const MPI: &[&str] = &["MPI_", "PMPI_", "MPIX_"];

fn list() -> PathBuf {
    tree().join("tests/tests/it/coverage/rows.txt")
}

fn rows() -> Vec<Row> {
    let text = fs::read_to_string(list()).unwrap();
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let row = |line: &str| {
        let (call, left) = line.rsplit_once(" = ")?;
        let (names, arguments) = call.strip_suffix(')')?.split_once('(')?;
        let names = names.split(" | ").map(String::from).collect();
        Some(Row { names, arguments: arguments.into(), left: left.into() })
    };
    lines.map(|line| row(line).unwrap_or_else(|| panic!("{line}"))).collect()
}

/// The library of a family that has a function: the one with the longest beginning of its name.
fn library_of(family: &[Library], name: &str) -> Option<&'static str> {
    let fits = family.iter().flat_map(|(soname, prefixes, _)| prefixes.iter().map(move |prefix| (*prefix, *soname)));
    fits.filter(|(prefix, _)| name.starts_with(prefix)).max_by_key(|(prefix, _)| prefix.len()).map(|(_, soname)| soname)
}

#[test]
fn every_function_of_the_table_has_a_line() {
    let symbols = Command::new("nm").args(["-D", "--defined-only"]).arg(artifacts().hook()).output().expect("nm runs");
    let symbols = String::from_utf8(symbols.stdout).unwrap();
    let exported = symbols.lines().filter_map(|line| line.rsplit(' ').next());
    let is_hooked = |name: &&str| FAMILIES.iter().any(|family| library_of(family, name).is_some());
    let exported: BTreeSet<&str> = exported.filter(is_hooked).collect();
    let rows = rows();
    let listed: Vec<&str> = rows.iter().flat_map(|row| &row.names).map(String::as_str).collect();
    assert_eq!(listed.iter().copied().collect::<BTreeSet<_>>(), exported);
    assert_eq!(listed.len(), exported.len(), "each once");
}

/// The calls of one row in C. A nonblocking operation is followed by its wait, and a persistent
/// request is started before that.
fn calls_of(name: &str, arguments: &str) -> Vec<(String, String)> {
    let own = (name.to_string(), arguments.to_string());
    let has_request =
        arguments.ends_with("REQUEST") && !["Start", "Wait", "Test"].iter().any(|word| name.contains(word));
    let wait = ("PMPI_Wait".to_string(), "REQUEST, 0".to_string());
    match has_request {
        true if name.trim_end_matches("_c").ends_with("_init") => {
            vec![own, ("PMPI_Start".into(), "REQUEST".into()), wait]
        }
        true => vec![own, wait],
        false => vec![own],
    }
}

/// An argument as wide as a register, unless it is a structure.
fn wide(argument: &str) -> String {
    if ["ID", "ONE"].contains(&argument) { argument.into() } else { format!("(long)({argument})") }
}

/// A call in C; `mark` notes when.
fn in_c((name, arguments): &(String, String), mark: bool) -> String {
    let arguments = arguments.split(", ").filter(|argument| !argument.is_empty()).map(wide);
    let call = format!("{name}({})", arguments.collect::<Vec<_>>().join(", "));
    let begin = if mark { format!("call(\"{name}\"); ") } else { String::new() };
    format!("    {begin}if ({call}) return 1;\n")
}

/// Builds a family's libraries and the program that calls the functions.
fn build_family(dir: &Path, family: &[Library], called: &[(&str, Vec<(String, String)>)]) -> PathBuf {
    let mut flags = vec![format!("-I{}", dir.display())];
    for (soname, _, adds) in family {
        let own = called.iter().filter(|(name, _)| library_of(family, name) == Some(soname));
        let stubs: String = own.map(|(name, _)| format!("STUB({name})\n")).collect();
        fs::write(dir.join("stubs.h"), stubs).unwrap();
        let mut build = vec![flags[0].clone(), "-shared".into(), "-fPIC".into(), "-DLIBRARY".into()];
        build
            .extend([format!("-Wl,-soname,{soname}"), (*adds).to_string()].into_iter().filter(|flag| !flag.is_empty()));
        gcc(&dir.join(soname), "rows.c", &build);
    }
    let bodies = called.iter().flat_map(|(_, calls)| {
        let fresh = if calls.len() > 1 { "    fresh(&cell);\n" } else { "" };
        let calls = calls.iter().enumerate().map(|(number, call)| in_c(call, number == 0));
        std::iter::once(fresh.to_string()).chain(calls)
    });
    let calls = format!("static int calls(void) {{\n{}    return 0;\n}}\n", bodies.collect::<String>());
    fs::write(dir.join("calls.h"), calls).unwrap();
    // Before what the environment says of where libraries are.
    flags.push(format!("-Wl,--disable-new-dtags,-rpath,{}", dir.display()));
    flags.extend(family.iter().flat_map(|(.., adds)| adds.split_whitespace()).map(String::from));
    flags.extend(family.iter().map(|(soname, ..)| dir.join(soname).display().to_string()));
    let program = dir.join("program");
    gcc(&program, "rows.c", &flags);
    program
}

/// The text of an operation, without the fields that are equal in all rows.
fn words(name: &str, operation: &Operation) -> String {
    let mut words = vec![match operation.kind() {
        OpKind::GraphLaunch => "GraphLaunch".to_string(),
        _ => format!("{:?}", operation.op()),
    }];
    if let Some(shape) = &operation.matmul {
        let transposes = format!("{}{}", shape.trans_a, shape.trans_b);
        words.push(format!(
            "{:?} {}x{}x{} batch {} {transposes}",
            operation.dtype(),
            shape.m,
            shape.n,
            shape.k,
            shape.batch
        ));
    }
    if operation.kind() == OpKind::Collective {
        words.push(format!("{:?} {}", operation.dtype(), operation.count));
    }
    if operation.peer >= 0 && operation.kind() == OpKind::Collective {
        words.push(format!("with {}", operation.peer));
    }
    if let Some(tag) = operation.tag {
        words.push(format!("tag {tag}"));
    }
    // MPI's second names stand for the first.
    let own = name.strip_prefix('P').unwrap_or(name);
    if !operation.function.is_empty() && operation.function != own {
        words.push(format!("by {}", operation.function));
    }
    words.join(" ")
}

/// Whether an entry of a row is only counted: `kernel`, `copy H2D 4096`, `allocation 4096`.
fn is_counted(word: &str) -> bool {
    ["kernel", "copy ", "allocation "].iter().any(|kind| word.starts_with(kind))
}

/// Calls every function of a family; what the record then has of each by its name.
fn left_by(family: &[Library], rows: &[Row]) -> BTreeMap<String, String> {
    let dir = TempDir::new().unwrap();
    let mut called = Vec::new();
    for row in rows {
        let own = row.names.iter().filter(|name| library_of(family, name).is_some());
        called.extend(own.map(|name| (name.as_str(), calls_of(name, &row.arguments))));
    }
    let program = build_family(dir.path(), family, &called);
    let times = dir.path().join("times");
    let mut all_of = None;
    let nothing_pends = |record: &FlightRecord| record.operations.iter().all(|one| one.status() != OpStatus::Pending);
    let record = run_under_and(
        &artifacts().hook(),
        (dir.path(), &program, &times),
        "auto",
        |_| {},
        nothing_pends,
        |collector, pid| all_of = Some((collector.totals(pid), collector.operations(pid))),
    );

    let mut calls: BTreeMap<&str, u64> = BTreeMap::new();
    for (name, _) in called.iter().flat_map(|(_, calls)| calls) {
        *calls.entry(name).or_default() += 1;
    }
    for (name, calls) in calls {
        let seen = record.coverage.iter().find(|function| function.name == name).map_or(0, |function| function.calls);
        assert_eq!(seen, calls, "calls of {name}");
    }
    let counted = |name: &str| {
        let row = rows.iter().find(|row| row.names.iter().any(|own| own == name)).expect("it is called for its row");
        row.left.split("; ").filter(|word| is_counted(word)).map(String::from).collect::<Vec<_>>()
    };
    let all: Vec<String> = called.iter().flat_map(|(name, _)| counted(name)).collect();
    let (totals, mut operations) = all_of.expect("calls of this family have made a ring");
    assert_eq!(totals.kernels, all.iter().filter(|word| *word == "kernel").count() as u64);
    let bytes_of = |what: &str| -> Vec<u64> {
        all.iter().filter_map(|word| word.strip_prefix(what)).map(|bytes| bytes.trim().parse().unwrap()).collect()
    };
    assert_eq!(totals.allocated_bytes, bytes_of("allocation ").iter().sum::<u64>());
    for (kind, name) in COPY_KINDS.iter().enumerate() {
        let bytes = bytes_of(&format!("copy {name} "));
        let expected = (bytes.len() as u64, bytes.iter().sum::<u64>());
        assert_eq!((totals.copies[kind], totals.copy_bytes[kind]), expected, "copies {name}");
    }

    let times = fs::read_to_string(&times).unwrap();
    let times: Vec<(&str, u64)> =
        times.lines().map(|line| line.split_once(' ').map(|(name, at)| (name, at.parse().unwrap())).unwrap()).collect();
    operations.sort_by_key(|operation| operation.ticket);
    let left = |span: &[(&str, u64)]| {
        let [(name, from), (_, to)] = span else { unreachable!("two") };
        let own = operations.iter().filter(|operation| (*from..*to).contains(&operation.entered_ns));
        let words: Vec<String> = counted(name).into_iter().chain(own.map(|operation| words(name, operation))).collect();
        let words = if words.is_empty() { "-".to_string() } else { words.join("; ") };
        (name.to_string(), words)
    };
    times.windows(2).map(left).collect()
}

#[test]
fn every_function_records_what_its_line_lists() {
    let rows = rows();
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    for family in FAMILIES {
        for (name, left) in left_by(family, &rows) {
            // Both interfaces of MPI have the same functions.
            let before = found.insert(name.clone(), left.clone());
            assert!(before.is_none_or(|before| before == left), "{name}: {left}");
        }
    }
    let bless = env::var_os("BLESS").is_some();
    let mut text = fs::read_to_string(list()).unwrap();
    for row in &rows {
        for name in &row.names {
            let left = found.get(name).unwrap_or_else(|| panic!("{name} was not called"));
            if bless && name == &row.names[0] {
                let line = |left: &str| format!("\n{}({}) = {left}\n", row.names.join(" | "), row.arguments);
                text = text.replace(&line(&row.left), &line(left));
            } else if bless {
                assert_eq!(left, &found[&row.names[0]], "{name} is not as {}", row.names[0]);
            } else {
                assert_eq!(left, &row.left, "{name}");
            }
        }
    }
    if bless {
        fs::write(list(), text).unwrap();
    }
}

/// Bytes that one rank's call of a function names, by the library's own documentation: the rows
/// have 64 elements where a call says what it sends or reduces and 32 where it says what it
/// receives, of two bytes in the libraries of devices and of four in MPI. `None` for a call that is
/// not a message or collective of one size.
fn bytes_by_the_document(name: &str) -> Option<u64> {
    let mpi = name.trim_start_matches('P').strip_prefix("MPI_").or_else(|| name.strip_prefix("MPIX_"));
    let Some(mpi) = mpi else {
        let stem = ["nccl", "mccl", "Hccl", "cncl"].iter().find_map(|library| name.strip_prefix(library))?;
        let stem = stem.trim_end_matches("Ext").trim_end_matches("Config").to_ascii_lowercase();
        return match stem.as_str() {
            // The whole buffer of a rank, which is equal on all ranks.
            "allreduce" | "allreducewithbias" | "reduce" | "broadcast" | "bcast" | "send" | "recv" | "putsignal" => {
                Some(128)
            }
            // `sendcount` of all_gather and gather, `recvcount` of reduce_scatter and scatter,
            // `count` of all-to-all: of one rank or pair.
            "allgather" | "gather" | "reducescatter" | "scatter" | "alltoall" => Some(128),
            // Each rank says for itself, or there is nothing in it.
            "alltoallv" | "alltoalld" | "barrier" | "signal" | "waitsignal" => Some(0),
            _ => None,
        };
    };
    let stem = mpi.trim_end_matches("_c").trim_end_matches("_init").to_ascii_lowercase();
    // Nonblocking: of the names that begin with an I, only these begin with one otherwise.
    let is_other = ["init", "intercomm"].iter().any(|other| stem.starts_with(other));
    match stem.trim_start_matches(|letter| letter == 'i' && !is_other) {
        // MPI 4.1, chapter 6: `count` elements of the buffer.
        "bcast" | "reduce" | "allreduce" | "scan" | "exscan" => Some(256),
        // The part sent to each rank, and the part that each rank sends to the root.
        "allgather" | "gather" | "alltoall" => Some(256),
        // The part that each rank receives: `recvcount` in both, which is 32 for the one and 64 for
        // the other.
        "scatter" => Some(128),
        "reduce_scatter_block" => Some(256),
        // Chapter 3. Partitioned, chapter 4: `count` elements in each of the two partitions.
        "send" | "ssend" | "rsend" | "bsend" => Some(256),
        "psend" => Some(512),
        // A receive says how much fits.
        "recv" | "precv" | "probe" | "mprobe" => Some(0),
        "barrier" | "reduce_scatter" => Some(0),
        // The receive of both comes first.
        "sendrecv" | "sendrecv_replace" => Some(0),
        other if other.ends_with('v') || other.ends_with('w') || other.starts_with("neighbor_") => Some(0),
        _ => None,
    }
}

#[test]
fn sizes_are_those_of_the_documents() {
    let width = |dtype: &str| match dtype {
        "Bfloat16" | "Float16" => 2,
        "Float32" => 4,
        _ => 1,
    };
    let mut compared = 0;
    for row in rows() {
        // Only what is an operation of one size, in one communicator: its word, its type, and how
        // many.
        let words: Vec<&str> = row.left.split(' ').collect();
        let [_, dtype, count, ..] = words[..] else { continue };
        let Ok(count) = count.parse::<u64>() else { continue };
        for name in &row.names {
            let Some(bytes) = bytes_by_the_document(name) else { continue };
            assert_eq!(count * width(dtype), bytes, "{name}");
            compared += 1;
        }
    }
    assert!(compared > 150, "{compared}");
}

/// The forms of the driver's functions by cudaTypedefs.h: name, CUDA version, number of arguments.
fn forms(header: &str) -> Vec<(&str, u32, usize)> {
    fn form(line: &str) -> Option<(&str, u32, usize)> {
        let (name, arguments) = line.strip_prefix("typedef CUresult (CUDAAPI *PFN_")?.split_once(")(")?;
        let arguments = arguments.strip_suffix(");")?;
        let (name, version) = name.trim_end_matches("_ptsz").trim_end_matches("_ptds").rsplit_once("_v")?;
        let count = if arguments == "void" { 0 } else { arguments.split(',').count() };
        Some((name, version.parse().ok()?, count))
    }
    header.lines().filter_map(form).collect()
}

#[test]
fn no_form_of_a_driver_function_has_more_arguments_than_its_row() {
    let Some((torch, _turn)) = crate::torch::pypi() else { return };
    let include = torch.packages().unwrap().join("triton/backends/nvidia/include");
    let header = fs::read_to_string(include.join("cudaTypedefs.h")).unwrap();
    let rows = rows();
    let arguments_of = |name: &str| {
        let row = rows.iter().find(|row| row.names.iter().any(|own| own == name))?;
        Some(row.arguments.split(", ").filter(|argument| !argument.is_empty()).count())
    };
    let mut compared = 0;
    for (name, version, count) in forms(&header) {
        let Some(own) = arguments_of(name) else { continue };
        // The hook distinguishes the longer forms by the version in the call of cuGetProcAddress.
        let longer = || arguments_of(&format!("{name}_v2")).is_some_and(|longer| count <= longer);
        assert!(count <= own || longer(), "{name} of CUDA {version} has {count} arguments, and the hook passes {own}");
        compared += 1;
    }
    assert!(compared > 60, "{compared}");
}
