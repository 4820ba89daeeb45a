//! The evidence of one incident as the nodes deliver it: merged on a thread of its own, judged, and
//! written to the folder. Memory holds only the merged evidence and the parts in flight.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use tracing::{info, warn};
use xpu_timer_analysis::{
    Verdict, folded,
    prefix_tree::{PrefixTree, TreeError},
    rank_set::RankSet,
};
use xpu_timer_proto::{
    Message as _, lenient, procfs,
    v1::{DumpFile, Evidence, NodeDump, ProcessEvidence, RankEvidence, StackTrees},
};

use crate::{
    cluster::{
        ranks::{Decoded, Ranks},
        service::Credit,
    },
    error::{Error, chain},
    incident::{
        Head, Plan,
        folder::{Folder, rank_of_file},
        judging, mild, records, retention,
        verdict_files::{link_latest, note_problem, write_verdict},
        viewer,
    },
    job::{JobKey, NodeId},
    os::{
        clock::{self, Now},
        resources,
    },
};

/// The input of the thread: the parts to gather, and the folder for them.
#[derive(Debug, Clone)]
pub struct GatherSetup {
    /// The dump of the job.
    pub plan: Plan,
    /// Ranks of the job.
    pub world_size: u32,
    /// The folder of the incident; `None` if none could be made.
    pub folder: Option<PathBuf>,
    /// Whether a new round begins: the folder contains the files of an earlier round.
    pub is_new_round: bool,
    /// When the first process of the job was started, on this collector's clock.
    pub job_started_ns: u64,
}

/// A part of a node's dump. Its trees and ranks are still encoded.
#[derive(Debug)]
pub struct NodePart {
    /// Name of the node.
    pub name: String,
    /// The ranks that it may report.
    pub allowed: RankSet,
    /// The evidence of the ranks of this part, all allowed.
    pub ranks: Vec<(u32, Vec<u8>)>,
    /// Everything else.
    pub dump: NodeDump,
}

/// The problem that a node delivers data of ranks that it may not report.
pub(crate) fn foreign_data(node: &str) -> String {
    format!("node {node} delivered data of ranks that it does not have; these data are ignored")
}

/// A task for the thread.
#[derive(Debug)]
pub enum GatherTask {
    /// A part of a node's dump.
    Part(NodeId, Box<NodePart>, Credit),
    /// Everything that arrives in time has arrived. Contains the ranks without evidence and the
    /// reasons, and other problems.
    Judge(Vec<RankEvidence>, Vec<String>),
    /// A piece of a file of a rank.
    File(Box<DumpFile>, Credit),
    /// The files of these ranks were cut off.
    TransferAborted(RankSet),
    /// The verdict shows no hang, and all files have arrived: the folder is a mild capture.
    KeepMild,
    /// All files of one kind have arrived: draw.
    Draw {
        /// Whether no timelines will follow.
        is_complete: bool,
    },
}

/// Reports of the thread.
#[derive(Debug)]
pub enum GatherEvent {
    /// The delivery of a node is merged: another one may start.
    Merged(NodeId),
    /// The verdict is made and written.
    Judged(Box<Verdict>),
    /// The pictures and the report are drawn, or could not be drawn.
    Drawn,
}

/// The merged stacks of the whole job.
pub const TREES: &str = "stacks.bin";
/// The evidence of all ranks.
const EVIDENCE: &str = "evidence.bin";
/// Time limit of the viewer; the verdict is already written.
const VIEW: Duration = Duration::from_secs(60);

/// Starts the thread. It ends when the `GatherTask` sender is dropped.
///
/// # Errors
/// If no thread can be started.
pub fn start(
    setup: GatherSetup,
    report: impl Fn(GatherEvent) + Send + 'static,
) -> Result<mpsc::Sender<GatherTask>, Error> {
    let (sender, work) = mpsc::channel();
    let run = move || Gather::new(setup).run(&work, &report);
    thread::Builder::new().name("gather".into()).spawn(run).map_err(Error::system("start the gathering thread"))?;
    Ok(sender)
}

struct Gather {
    setup: GatherSetup,
    native: PrefixTree,
    python: PrefixTree,
    ranks: Ranks,
    // The processes of all nodes that are not ranks.
    processes: Vec<ProcessEvidence>,
    // Set after a verdict: the ranks are in the folder and no longer in `ranks`.
    written: bool,
    errors: Vec<String>,
    // Files by rank and extension; a node has one of each kind for each of its ranks.
    files: BTreeMap<FileKey, IncomingFile>,
    // Whether `latest` was set after the newest verdict.
    is_linked: bool,
}

/// Rank and extension of a file.
type FileKey = (u32, String);

/// A file that has been received in part.
struct IncomingFile {
    name: String,
    bytes: u64,
    // `None` if it is complete.
    file: Option<fs::File>,
}

/// Maximum number of processes of a job that are not ranks. A node reports a few at most.
const MAX_PROCESSES: usize = 1 << 16;

/// A dump has some megabytes. Without this limit a node could fill the disk.
const MAX_FILE_BYTES: u64 = 1 << 30;

impl Gather {
    /// Continues with the files that an earlier gathering of this incident has written.
    fn new(setup: GatherSetup) -> Self {
        let mut gather = Gather {
            native: PrefixTree::new(),
            python: PrefixTree::new(),
            ranks: Ranks::default(),
            processes: Vec::new(),
            written: false,
            errors: Vec::new(),
            files: BTreeMap::new(),
            is_linked: false,
            setup,
        };
        let kept = if gather.setup.is_new_round { None } else { gather.read(TREES) };
        let trees = kept.and_then(|bytes| lenient::decode::<StackTrees>(&bytes).ok());
        if let Some(trees) = trees {
            gather.written = true;
            for (tree, message) in [(&mut gather.native, trees.native), (&mut gather.python, trees.python)] {
                if let Some(Err(error)) = message.map(|message| tree.merge_message(&message)) {
                    gather.errors.push(format!("the earlier stacks cannot be used: {error}"));
                }
            }
        }
        gather
    }

    fn read(&self, name: &str) -> Option<Vec<u8>> {
        fs::read(self.setup.folder.as_ref()?.join(name)).ok()
    }

    /// Loads the ranks into memory again to add to them.
    fn reload_ranks(&mut self) {
        if !std::mem::take(&mut self.written) {
            return;
        }
        match self.read(EVIDENCE).and_then(|bytes| lenient::decode::<Evidence>(&bytes).ok()) {
            Some(evidence) => {
                self.ranks.extend(evidence.ranks);
                self.processes = evidence.processes;
            }
            None => self.errors.push(format!("the earlier deliveries cannot be read from {EVIDENCE}")),
        }
    }

    fn run(mut self, work: &mpsc::Receiver<GatherTask>, report: &impl Fn(GatherEvent)) {
        for item in work {
            match item {
                GatherTask::Part(node, part, _credit) => {
                    let last = part.dump.last;
                    self.part(*part);
                    if last {
                        report(GatherEvent::Merged(node));
                    }
                }
                GatherTask::Judge(missing, errors) => {
                    report(GatherEvent::Judged(Box::new(self.judge(missing, errors))))
                }
                GatherTask::File(file, _credit) => self.file(*file),
                GatherTask::TransferAborted(ranks) => self.transfer_aborted(&ranks),
                GatherTask::KeepMild => self.keep_mild(),
                GatherTask::Draw { is_complete } => {
                    self.draw(is_complete);
                    report(GatherEvent::Drawn);
                }
            }
        }
        drop(self);
        resources::trim_heap();
    }

    fn part(&mut self, part: NodePart) {
        let NodePart { name, allowed, ranks, dump } = part;
        for (tree, message) in [(&mut self.native, &dump.native), (&mut self.python, &dump.python)] {
            if let Err(error) = tree.merge_encoded(message, &allowed) {
                let problem = match error {
                    TreeError::ForeignRank { .. } => foreign_data(&name),
                    error => format!("node {name}: its stacks cannot be used: {error}"),
                };
                warn!("incident {}: {problem}", self.setup.plan.head.id);
                self.errors.push(problem);
            }
        }
        self.errors.extend(dump.errors);
        self.reload_ranks();
        self.ranks.extend_encoded(ranks);
        let room = MAX_PROCESSES.saturating_sub(self.processes.len());
        self.processes.extend(dump.processes.into_iter().take(room));
    }

    fn judge(&mut self, missing: Vec<RankEvidence>, errors: Vec<String>) -> Verdict {
        let begun = Instant::now();
        self.reload_ranks();
        let missing = missing.into_iter().filter(|rank| !self.ranks.holds(rank.rank)).collect::<Vec<_>>();
        self.ranks.extend(missing);
        let processes = self.processes.clone();
        let evidence = Evidence { world_size: self.setup.world_size, processes, ..self.setup.plan.evidence() };
        let mut decoded = Decoded { evidence, operations: Vec::new() };
        let not_written = self.write_evidence(&mut decoded);
        self.ranks.decode_into(&mut decoded);
        let count = decoded.evidence.ranks.len();
        let mut verdict = judging::judge_encoded(&decoded.evidence, &decoded.operations);
        info!("incident {}: {count} ranks judged in {:.0?}", self.setup.plan.head.id, begun.elapsed());
        let ranks = decoded.take_ranks();
        if self.written {
            // Millions of small pieces of memory take half a second. The verdict does not wait for
            // that. Without a thread, they are freed here.
            drop(thread::Builder::new().name("free".into()).spawn(move || drop(ranks)));
        } else {
            // They exist only in memory.
            self.ranks.extend(ranks);
        }
        self.setup.plan.date(&mut verdict);
        verdict.timing.errors.extend(errors);
        verdict.timing.errors.append(&mut self.errors);
        verdict.timing.errors.extend(not_written);
        verdict.timing.errors.extend(self.write_stacks(verdict.world_size));
        // Uses the wall clock, because the collector may have restarted in between.
        let head = &self.setup.plan.head;
        let since = Now::get().unix_ns.saturating_sub(head.opened.unix_ns) + head.late_ns;
        verdict.timing.seconds_from_timeout = Some(clock::seconds(since));
        if let Some(folder) = self.folder() {
            folder.release_reserve();
            folder.announce_timelines();
            let earlier = self.promote_captures(&folder, &verdict);
            verdict.timing.earlier.extend(earlier.iter().cloned());
            write_verdict(&folder, &verdict);
            if let Some(root) = folder.path.parent() {
                mild::draw(root, &earlier);
            }
        }
        self.is_linked = false;
        verdict
    }

    /// The reader of a hang sees how the job looked before: its mild captures become incidents.
    /// Returns their names.
    fn promote_captures(&self, folder: &Folder, verdict: &Verdict) -> Vec<String> {
        let Some(root) = folder.path.parent().filter(|_| !mild::is_mild(verdict)) else { return Vec::new() };
        let Head { id, job: JobKey { name, instance }, .. } = self.setup.plan.head.clone();
        let started_ns = self.setup.job_started_ns;
        let of = mild::OfJob { job: name, instance, boot: procfs::boot_id(), started_ns };
        mild::promote(root, &of, &format!("the job hung later (incident {id})"))
    }

    /// Moves the ranks to the evidence, and writes it. If that fails, some ranks are not moved.
    /// Returns the problem.
    fn write_evidence(&mut self, decoded: &mut Decoded) -> Option<String> {
        let Some(folder) = self.folder() else { return Some("no folder could be created".into()) };
        let result = folder.write_with(EVIDENCE, |to| self.ranks.write_into(decoded, to));
        self.written = result.is_ok();
        self.problem_of(result)
    }

    fn write_stacks(&self, world_size: u32) -> Vec<String> {
        let Some(folder) = self.folder() else { return Vec::new() };
        // One tree at a time: in a large job each may have some hundred megabytes.
        let trees = || {
            let message = |tree: &PrefixTree| Some(tree.to_message());
            StackTrees { world_size, native: message(&self.native), python: message(&self.python) }.encode_to_vec()
        };
        let folded = |name: &str, tree| folder.write(name, folded::folded(tree, world_size).as_bytes());
        let results =
            [folder.write(TREES, &trees()), folded("cpp_stack", &self.native), folded("py_stack", &self.python)];
        results.into_iter().filter_map(|result| self.problem_of(result)).collect()
    }

    fn folder(&self) -> Option<Folder> {
        self.setup.folder.clone().map(|path| Folder { path })
    }

    /// Logs an error and returns its text for the verdict.
    fn problem_of(&self, result: Result<(), Error>) -> Option<String> {
        let problem = chain(&result.err()?);
        warn!("incident {}: {problem}", self.setup.plan.head.id);
        Some(problem)
    }

    /// Appends a piece. The hub has checked that the rank belongs to the node. Each rank has one
    /// file of each kind, whatever names a node sends.
    fn file(&mut self, piece: DumpFile) {
        let (Some(folder), Some(rank)) = (self.setup.folder.clone(), rank_of_file(&piece.name)) else { return };
        let key = (rank, piece.name.rsplit('.').next().unwrap_or_default().to_string());
        if self.files.get(&key).is_some_and(|incoming| incoming.name != piece.name) {
            return;
        }
        let part = folder.join(partial_name(&piece.name));
        if let Err(error) = self.append(key.clone(), &piece, &folder, &part) {
            warn!("incident {}: {}: {error}", self.setup.plan.head.id, part.display());
            self.files.remove(&key);
            // Remove an incomplete file.
            let _ = fs::remove_file(&part);
        }
    }

    fn append(&mut self, key: FileKey, piece: &DumpFile, folder: &Path, part: &Path) -> io::Result<()> {
        let new = || IncomingFile { name: piece.name.clone(), bytes: 0, file: None };
        let incoming = self.files.entry(key).or_insert_with(new);
        let file = match &mut incoming.file {
            Some(file) => file,
            // A node that is asked again starts over.
            none => {
                incoming.bytes = 0;
                let _ = fs::remove_file(part);
                none.insert(fs::File::create_new(part)?)
            }
        };
        incoming.bytes += piece.data.len() as u64;
        if incoming.bytes > MAX_FILE_BYTES {
            return Err(io::Error::other(format!("larger than {MAX_FILE_BYTES} bytes")));
        }
        file.write_all(&piece.data)?;
        if piece.last {
            incoming.file = None;
            fs::rename(part, folder.join(&piece.name))?;
        }
        Ok(())
    }

    /// The transfer of these files was cut off. If they are requested again, they start over.
    fn transfer_aborted(&mut self, ranks: &RankSet) {
        let (gone, kept) =
            std::mem::take(&mut self.files).into_iter().partition(|((rank, _), _)| ranks.contains(*rank));
        self.files = kept;
        self.remove(gone);
    }

    /// Removes incomplete files.
    fn remove(&self, files: BTreeMap<FileKey, IncomingFile>) {
        let Some(folder) = &self.setup.folder else { return };
        for incoming in files.into_values().filter(|incoming| incoming.file.is_some()) {
            let _ = fs::remove_file(folder.join(partial_name(&incoming.name)));
        }
    }

    fn keep_mild(&mut self) {
        let files = std::mem::take(&mut self.files);
        self.remove(files);
        if let Some(folder) = &self.setup.folder {
            retention::keep_capture(folder);
        }
    }

    fn draw(&mut self, is_complete: bool) {
        let Some(folder) = self.folder() else { return };
        let (half, whole) = std::mem::take(&mut self.files).into_iter().partition(|(_, file)| file.file.is_some());
        self.remove(half);
        self.files = whole;
        if let Err(error) = viewer::run(&folder.path, is_complete, VIEW) {
            let problem = chain(&error);
            warn!("incident {}: {problem}", self.setup.plan.head.id);
            note_problem(&folder.path, problem);
        }
        if is_complete {
            self.files.clear();
            folder.timelines_came();
        }
        // When the timelines have come, `latest` may name a newer incident.
        if std::mem::replace(&mut self.is_linked, true) {
            return;
        }
        let verdict = records::verdict(&folder.path);
        let linked = verdict.map_or_else(|| folder.link_latest(), |verdict| link_latest(&folder, &verdict));
        if let Err(error) = linked {
            warn!("incident {}: {}", self.setup.plan.head.id, chain(&error));
        }
    }
}

/// The temporary name of a file during its transfer.
fn partial_name(name: &str) -> String {
    format!(".{name}.new")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::incident::Head;

    #[test]
    fn a_node_has_one_file_for_each_rank() {
        let folder = tempfile::tempdir().unwrap();
        let second = Duration::from_secs(1);
        let mut gather = Gather::new(GatherSetup {
            plan: Plan { head: Head::for_test(), hang_timeout: second, sample_interval: second },
            world_size: 8,
            folder: Some(folder.path().into()),
            is_new_round: true,
            job_started_ns: 0,
        });
        let piece = |name: &str, data: &[u8], last| DumpFile {
            name: name.into(),
            data: data.into(),
            last,
            ..Default::default()
        };
        let names = || {
            let entries = fs::read_dir(folder.path()).unwrap();
            let mut names: Vec<String> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        // Each would keep a descriptor open until its last piece arrives.
        for world in 8..2000 {
            gather.file(piece(&format!("00003-{world:05}.stacktrace"), b"a", false));
        }
        assert_eq!(names(), [".00003-00008.stacktrace.new"]);
        gather.file(piece("00003-00008.stacktrace", b"b", true));
        gather.file(piece("00003-00009.stacktrace", b"c", true));
        gather.file(piece("00004-00008.stacktrace", b"e", true));
        gather.file(piece("../00005-00008.stacktrace", b"f", true));
        let whole = ["00003-00008.stacktrace", "00004-00008.stacktrace"];
        assert_eq!(names(), whole);
        gather.file(piece("00003-00008.ops", b"o", true));
        gather.file(piece("00003-00009.ops", b"p", true));
        assert_eq!(fs::read(folder.path().join("00003-00008.ops")).unwrap(), b"o");
        fs::remove_file(folder.path().join("00003-00008.ops")).unwrap();
        assert_eq!(names(), whole, "each kind once");
        assert_eq!(fs::read(folder.path().join(whole[0])).unwrap(), b"ab");
        // The data before the cut must not precede the data of the next request.
        gather.file(piece(whole[0], b"half of it", false));
        gather.transfer_aborted(&[3].into_iter().collect());
        assert_eq!(names(), whole);
        gather.file(piece(whole[0], b"all of it", true));
        assert_eq!(fs::read(folder.path().join(whole[0])).unwrap(), b"all of it");
    }
}
