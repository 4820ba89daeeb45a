//! Texts for people: lists of ranks, names of operations, and `verdict.txt`.

use std::fmt::Write as _;

pub(crate) use xpu_timer_proto::printable::capital;
use xpu_timer_proto::{
    printable,
    v1::{DataType, Matmul, Op, Operation},
};

use crate::{
    stacks::{base_name, shortened},
    verdict::{CommunicatorReport, KnownDefect, OperationState, Verdict},
};

/// Width of `verdict.txt`, in columns.
const WIDTH: usize = 100;
/// Maximum number of lines in a section of `verdict.txt`.
const MAX_LINES: usize = 30;
/// Maximum number of runs in a list of ranks in prose.
const MAX_RUNS: usize = 12;

/// Ascending runs of ranks, cut after [`MAX_RUNS`]: `0-2, 5`.
pub(crate) fn runs(ranks: &[u32]) -> String {
    let mut text = String::new();
    let mut count = 0;
    let mut rest = ranks;
    while let Some((&first, _)) = rest.split_first() {
        let length =
            rest.iter().enumerate().take_while(|(index, rank)| u64::from(**rank) == u64::from(first) + *index as u64);
        let length = length.count().max(1);
        if count == MAX_RUNS {
            let _ = write!(text, " and {} more", rest.len());
            break;
        }
        if count > 0 {
            text.push_str(", ");
        }
        let _ = match length {
            1 => write!(text, "{first}"),
            _ => write!(text, "{first}-{}", rest[length - 1]),
        };
        count += 1;
        rest = &rest[length..];
    }
    text
}

/// `rank 2`, `ranks 0-1, 3`, or `no rank`.
pub(crate) fn ranks(ranks: &[u32]) -> String {
    match ranks {
        [] => "no rank".to_owned(),
        [one] => format!("rank {one}"),
        many => format!("ranks {}", runs(many)),
    }
}

/// The name of an operation, such as `all_reduce`.
pub(crate) fn op_name(op: Op) -> &'static str {
    match op {
        Op::Unspecified => "operation",
        Op::AllReduce => "all_reduce",
        Op::Reduce => "reduce",
        Op::Broadcast => "broadcast",
        Op::AllGather => "all_gather",
        Op::ReduceScatter => "reduce_scatter",
        Op::AllToAll => "all_to_all",
        Op::Gather => "gather",
        Op::Scatter => "scatter",
        Op::Send => "send",
        Op::Recv => "recv",
        Op::Barrier => "barrier",
        Op::CommInit => "comm_init",
        Op::CommSplit => "comm_split",
        Op::CommFinalize => "comm_finalize",
        Op::CommDestroy => "comm_destroy",
        Op::CommAbort => "comm_abort",
        Op::GroupEnd => "group_end",
        Op::Kernel => "kernel",
        Op::Graph => "graph_launch",
        Op::Matmul => "matmul",
        Op::Attention => "flash_attention",
        Op::Copy => "copy",
        Op::PythonCall => "python_call",
    }
}

/// The name of an element type, such as `float32`. Empty if unknown.
pub(crate) fn dtype_name(dtype: DataType) -> &'static str {
    match dtype {
        DataType::Unspecified => "",
        DataType::Int8 => "int8",
        DataType::Uint8 => "uint8",
        DataType::Int32 => "int32",
        DataType::Uint32 => "uint32",
        DataType::Int64 => "int64",
        DataType::Uint64 => "uint64",
        DataType::Float16 => "float16",
        DataType::Float32 => "float32",
        DataType::Float64 => "float64",
        DataType::Bfloat16 => "bfloat16",
        DataType::Float8E4m3 => "float8_e4m3",
        DataType::Float8E5m2 => "float8_e5m2",
        DataType::Complex64 => "complex64",
        DataType::Complex128 => "complex128",
    }
}

/// The identity of a communicator in hexadecimal, without leading zeros.
pub fn communicator(id: u64) -> String {
    format!("{id:#x}")
}

/// The name of a collective: its kind, or the function behind it if that says more, such as
/// `MPI_Finalize`.
pub(crate) fn name(operation: &Operation) -> &str {
    match operation.op() {
        Op::Unspecified | Op::Barrier | Op::PythonCall if !operation.function.is_empty() => &operation.function,
        op => op_name(op),
    }
}

/// The name of a reduction with what it computes: `all_reduce (max)`.
pub(crate) fn reduction(operation: &Operation) -> String {
    const COMPUTES: [&str; 5] = ["sum", "product", "max", "min", "average"];
    let computes = COMPUTES.get(operation.reduce_op as usize).unwrap_or(&"a custom operation");
    format!("{} ({computes})", name(operation))
}

/// An operation with its size: `all_reduce of 1024 x float32`.
pub fn shape(operation: &Operation) -> String {
    if operation.op() == Op::Copy {
        return format!("{} of {} bytes", operation.function, operation.count);
    }
    if let Some(Matmul { batch, m, n, k, .. }) = operation.matmul.as_deref() {
        let batch = if *batch > 1 { format!("{batch} x ") } else { String::new() };
        return format!("{} of {batch}{m} x {n} x {k} {}", operation.function, dtype_name(operation.dtype()));
    }
    let name = match operation.op() {
        Op::Kernel | Op::Graph | Op::Unspecified if !operation.function.is_empty() => &operation.function,
        op => op_name(op),
    };
    match dtype_name(operation.dtype()) {
        "" => name.to_owned(),
        dtype => format!("{name} of {} x {dtype}", operation.count),
    }
}

/// An operation as it appears in `verdict.json`.
pub fn operation_state(operation: &Operation) -> OperationState {
    OperationState {
        op: match operation.op() {
            Op::Kernel | Op::Graph | Op::Matmul | Op::Attention | Op::Unspecified if !operation.function.is_empty() => {
                operation.function.clone()
            }
            op => op_name(op).to_owned(),
        },
        communicator: (operation.communicator != 0).then(|| communicator(operation.communicator)),
        seq: operation.seq,
        count: operation.count,
        dtype: dtype_name(operation.dtype()).to_owned(),
        peer: u32::try_from(operation.peer).ok(),
        started: operation.started_ns != 0,
    }
}

/// `process 8176 (python3 engine.py)`, with the command shortened.
pub(crate) fn process_name(pid: i32, command: &str) -> String {
    // The last parts of paths say more than their folders.
    let words: Vec<&str> =
        command.split(' ').map(|word| if word.starts_with('/') { base_name(word) } else { word }).collect();
    let command = shortened(&words.join(" "));
    if command.is_empty() { format!("process {pid}") } else { format!("process {pid} ({command})") }
}

impl Verdict {
    /// The content of `verdict.txt`: the sentence, the evidence, the state of the communicators and
    /// of the ranks, and what was ruled out. Lines have at most 100 columns, unless a single word
    /// is longer.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        paragraph(&mut text, &self.sentence, "");
        text.push('\n');
        if let Some(reason) = &self.timing.promoted {
            paragraph(&mut text, &format!("This capture shows no hang. It is kept because {reason}."), "");
            text.push('\n');
        }
        let others = self.culprit_processes.iter().filter(|process| process.rank.is_none());
        let others = others.map(|process| process_name(process.pid, &process.command));
        let ranks = Some(runs(&self.culprits)).filter(|ranks| !ranks.is_empty());
        let culprits: Vec<String> = ranks.into_iter().chain(others).collect();
        let culprits = if culprits.is_empty() { "none".to_owned() } else { culprits.join(", ") };
        let victims = if self.victims.is_empty() { "none".to_owned() } else { runs(&self.victims) };
        paragraph(&mut text, &format!("cause:       {} ({} confidence)", self.cause, self.confidence.name()), "");
        if let Some(right) = self.right_of_hundred() {
            let kind = "verdicts of this kind name exactly the right culprits";
            paragraph(&mut text, &format!("reliability: about {right} of 100 {kind}"), "             ");
        }
        paragraph(&mut text, &format!("culprits:    {culprits}"), "             ");
        paragraph(&mut text, &format!("victims:     {victims}"), "             ");
        let job = if self.job.is_empty() { String::new() } else { format!("{}, ", self.job) };
        paragraph(
            &mut text,
            &format!(
                "job:         {job}{}, attempt {}, incident {}",
                rank_count(self.world_size),
                self.attempt,
                self.incident
            ),
            "             ",
        );
        for defect in &self.known_defects {
            paragraph(&mut text, &known_line(defect), "             ");
        }
        if !self.timing.earlier.is_empty() {
            let earlier = self.timing.earlier.join(", ");
            paragraph(&mut text, &format!("earlier:     {earlier} (captures without a hang)"), "             ");
        }
        if !self.timing.same_culprit.is_empty() {
            let others = self.timing.same_culprit.join(", ");
            paragraph(&mut text, &format!("same:        {others} (other jobs, the same culprit)"), "             ");
        }
        if let Some(line) = self.hook.line() {
            paragraph(&mut text, &format!("hook:        {line}"), "             ");
        }

        section(&mut text, "Evidence", self.evidence.iter().map(|line| line.text.clone()));
        section(&mut text, "State of the communicators", self.communicators.iter().flat_map(communicator_lines));
        section(&mut text, "State of the ranks", self.ranks.iter().map(rank_line));
        section(
            &mut text,
            "Ruled out",
            self.ruled_out.iter().map(|ruled_out| format!("{}: {}", ruled_out.cause, ruled_out.reason)),
        );
        section(&mut text, "Errors", self.timing.errors.iter().cloned());
        text
    }
}

fn known_line(defect: &KnownDefect) -> String {
    format!("known:       {} {} ({})", defect.text, defect.url, ranks(&defect.ranks))
}

/// `1 rank` or `4 ranks`.
pub(crate) fn rank_count(count: u32) -> String {
    format!("{count} {}", if count == 1 { "rank" } else { "ranks" })
}

fn communicator_lines(report: &CommunicatorReport) -> Vec<String> {
    let communicator = format!("{} ({})", report.id, rank_count(report.size));
    let mut lines = Vec::new();
    for group in &report.groups {
        let state = match &group.waits_in {
            Some(operation) => {
                let dtype = match operation.dtype.as_str() {
                    "" => String::new(),
                    dtype => format!(" of {} x {dtype}", operation.count),
                };
                let state = if operation.started { "started, not completed" } else { "launched, not started" };
                let peer = operation.peer.map_or(String::new(), |peer| format!(", peer {peer}"));
                format!("{} {}{dtype}{peer}, {state}", operation.op, operation.seq)
            }
            None => {
                format!("nothing pending, {} collectives launched, {} completed", group.launched, group.completed)
            }
        };
        lines.push(format!("{communicator}: {}: {state}", ranks(&group.ranks)));
    }
    if !report.silent.is_empty() {
        lines.push(format!("{communicator}: {}: no flight record", ranks(&report.silent)));
    }
    if report.unnamed > 0 {
        let ranks = if report.unnamed == 1 { "rank" } else { "ranks" };
        lines.push(format!("{communicator}: {} more {ranks}: not seen", report.unnamed));
    }
    lines
}

fn rank_line(group: &crate::verdict::RankGroup) -> String {
    let mut line = format!("{}: {}", ranks(&group.ranks), group.presence);
    if !group.process_state.is_empty() {
        let _ = write!(line, ", {}", group.process_state);
    }
    let location = &group.location;
    if let Some(python) = &location.python {
        let _ = write!(line, ", {} at {python}", location.python_function.as_deref().unwrap_or("?"));
    }
    if let Some(native) = &location.native {
        let _ = write!(line, ", in C function {native}");
    }
    for error in &group.errors {
        let _ = write!(line, "; {error}");
    }
    line
}

fn section(text: &mut String, title: &str, lines: impl Iterator<Item = String>) {
    let mut lines = lines.peekable();
    if lines.peek().is_none() {
        return;
    }
    let _ = write!(text, "\n{title}\n");
    for line in lines.by_ref().take(MAX_LINES) {
        paragraph(text, &format!("  - {line}"), "    ");
    }
    let rest = lines.count();
    if rest > 0 {
        let _ = writeln!(text, "  - and {rest} more in verdict.json");
    }
}

/// Adds one paragraph, broken between words. Lines after the first begin with `indent`.
fn paragraph(text: &mut String, content: &str, indent: &str) {
    let content = printable::line(content);
    let mut column = 0;
    for word in content.split_inclusive(' ') {
        let length = word.trim_end().chars().count();
        if column > indent.len() && column + length > WIDTH {
            while text.ends_with(' ') {
                text.pop();
            }
            text.push('\n');
            text.push_str(indent);
            column = indent.len();
        }
        text.push_str(word);
        column += word.chars().count();
    }
    while text.ends_with(' ') {
        text.pop();
    }
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_product_is_named_by_its_shape() {
        let matmul = Matmul { batch: 8, m: 4096, n: 1024, k: 512, ..Matmul::default() };
        let mut operation =
            Operation { function: "cublasGemmEx".into(), matmul: Some(matmul.into()), ..Operation::default() };
        operation.set_op(Op::Matmul);
        operation.set_dtype(DataType::Bfloat16);
        assert_eq!(shape(&operation), "cublasGemmEx of 8 x 4096 x 1024 x 512 bfloat16");
    }

    #[test]
    fn ranks_are_listed_as_runs() {
        assert_eq!(ranks(&[]), "no rank");
        assert_eq!(ranks(&[7]), "rank 7");
        assert_eq!(ranks(&[0, 1, 3]), "ranks 0-1, 3");
        assert_eq!(ranks(&[4, 5, 6, 7]), "ranks 4-7");
        assert_eq!(ranks(&[u32::MAX - 1, u32::MAX]), "ranks 4294967294-4294967295");
        let odd: Vec<u32> = (0..40).map(|rank| 2 * rank).collect();
        assert!(runs(&odd).ends_with("22 and 28 more"), "{}", runs(&odd));
    }

    #[test]
    fn paragraphs_keep_their_width_and_their_words() {
        let words: Vec<String> = (0..80).map(|number| format!("word{number}")).collect();
        let mut text = String::new();
        paragraph(&mut text, &words.join(" "), "    ");
        assert!(text.lines().count() > 3);
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH && !line.ends_with(' ')), "{text}");
        assert_eq!(text.split_whitespace().collect::<Vec<_>>(), words);
        assert!(text.lines().skip(1).all(|line| line.starts_with("    word")), "{text}");

        let mut text = String::new();
        paragraph(&mut text, &format!("a\nb {}", "x".repeat(300)), "  ");
        assert_eq!(text, format!("a b\n  {}\n", "x".repeat(300)));
    }
}
