//! The evidence of one incident as it comes from the nodes: merged on a thread of its own, judged, and written into the folder.
//! Never more than the merged whole and the parts in flight are in memory.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use tracing::{info, warn};
use xpu_timer_analysis::{Status, Verdict, folded, prefix_tree::PrefixTree};
use xpu_timer_proto::{
    Message as _, lenient,
    v1::{DumpFile, Evidence, NodeDump, RankEvidence, StackTrees, Trigger},
};

use super::{hub::Left, memory, nodes::NodeId, ranks::Ranks, service::Credit};
use crate::{
    clock::{self, Now},
    delivery::rank_of,
    dump::write_verdict,
    error::{Error, chain},
    folder::Folder,
    judging, viewer,
};

/// What is gathered.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Name of the incident.
    pub incident: String,
    /// Name of the job.
    pub job: String,
    /// Attempt.
    pub attempt: u32,
    /// Ranks of the job.
    pub world_size: u32,
    /// What opened it.
    pub trigger: Trigger,
    /// When.
    pub opened: Now,
    /// How long before that the timeout had run out.
    pub late_ns: u64,
    /// Hang timeout of the job.
    pub hang_timeout_ns: u64,
    /// Between the two samples.
    pub sample_interval_ns: u64,
    /// The incident's folder; `None` when none could be made.
    pub folder: Option<PathBuf>,
    /// It begins: what is in the folder is that of an earlier look.
    pub fresh: bool,
}

/// What the thread is given to do.
#[derive(Debug)]
pub enum Work {
    /// A part of a node's dump.
    Part(NodeId, Box<NodeDump>, Credit),
    /// All that will come in time has come. Ranks of which nothing came, with the reason, and what else went wrong.
    Judge(Vec<RankEvidence>, Vec<String>),
    /// A piece of a `.stacktrace` file.
    File(Box<DumpFile>, Credit),
    /// No more files: draw.
    Draw,
}

/// What the thread tells.
#[derive(Debug)]
pub enum Done {
    /// All that a node delivered is merged: another one may deliver.
    Merged(NodeId),
    /// The verdict is made and written.
    Judged(Box<Verdict>),
    /// The pictures and the report are drawn, or could not be.
    Drawn,
}

/// All stacks of the job, merged.
pub const TREES: &str = "stacks.bin";
/// What is known of the ranks.
const EVIDENCE: &str = "evidence.bin";
/// The viewer's time; the verdict is there already.
const VIEW: Duration = Duration::from_secs(60);

/// Starts the thread. It ends when `work` is dropped.
///
/// # Errors
/// When there are no threads.
pub fn start(plan: Plan, tell: impl Fn(Done) + Send + 'static) -> Result<mpsc::Sender<Work>, Error> {
    let (sender, work) = mpsc::channel();
    let run = move || Gather::new(plan).run(&work, &tell);
    thread::Builder::new().name("gather".into()).spawn(run).map_err(Error::system("start the gathering thread"))?;
    Ok(sender)
}

struct Gather {
    plan: Plan,
    native: PrefixTree,
    python: PrefixTree,
    ranks: Ranks,
    // After a verdict the ranks are in the folder and not in `ranks`.
    written: bool,
    errors: Vec<String>,
    files: BTreeMap<String, fs::File>,
}

impl Gather {
    /// Goes on with what an earlier gathering of the same incident has written.
    fn new(plan: Plan) -> Self {
        let mut gather = Gather {
            native: PrefixTree::new(),
            python: PrefixTree::new(),
            ranks: Ranks::default(),
            written: false,
            errors: Vec::new(),
            files: BTreeMap::new(),
            plan,
        };
        let kept = if gather.plan.fresh { None } else { gather.read(TREES) };
        let trees = kept.and_then(|bytes| lenient::decode::<StackTrees>(&bytes).ok());
        if let Some(trees) = trees {
            gather.written = true;
            gather.merge(trees.native.as_ref(), trees.python.as_ref());
        }
        gather
    }

    fn read(&self, name: &str) -> Option<Vec<u8>> {
        fs::read(self.plan.folder.as_ref()?.join(name)).ok()
    }

    /// Has the ranks in memory again, to add to them.
    fn recall(&mut self) {
        if !std::mem::take(&mut self.written) {
            return;
        }
        match self.read(EVIDENCE).and_then(|bytes| lenient::decode::<Evidence>(&bytes).ok()) {
            Some(evidence) => self.ranks.extend(evidence.ranks),
            None => self.errors.push(format!("what was delivered before cannot be read from {EVIDENCE} any more")),
        }
    }

    fn run(mut self, work: &mpsc::Receiver<Work>, tell: &impl Fn(Done)) {
        for item in work {
            match item {
                Work::Part(node, part, _credit) => {
                    let last = part.last;
                    self.part(*part);
                    if last {
                        tell(Done::Merged(node));
                    }
                }
                Work::Judge(missing, errors) => tell(Done::Judged(Box::new(self.judge(missing, errors)))),
                Work::File(file, _credit) => self.file(*file),
                Work::Draw => {
                    self.draw();
                    tell(Done::Drawn);
                }
            }
        }
        drop(self);
        memory::trim();
    }

    fn part(&mut self, part: NodeDump) {
        self.merge(part.native.as_ref(), part.python.as_ref());
        self.errors.extend(part.errors);
        self.recall();
        self.ranks.extend(part.ranks);
    }

    fn merge(
        &mut self,
        native: Option<&xpu_timer_proto::v1::StackTree>,
        python: Option<&xpu_timer_proto::v1::StackTree>,
    ) {
        for (tree, message) in [(&mut self.native, native), (&mut self.python, python)] {
            if let Some(Err(error)) = message.map(|message| tree.merge_message(message)) {
                self.errors.push(format!("stacks of a node cannot be used: {error}"));
            }
        }
    }

    fn judge(&mut self, missing: Vec<RankEvidence>, errors: Vec<String>) -> Verdict {
        let begun = Instant::now();
        self.recall();
        let missing = missing.into_iter().filter(|rank| !self.ranks.holds(rank.rank)).collect::<Vec<_>>();
        self.ranks.extend(missing);
        let mut evidence = Evidence {
            incident: self.plan.incident.clone(),
            job: self.plan.job.clone(),
            world_size: self.plan.world_size,
            attempt: self.plan.attempt,
            trigger: Some(self.plan.trigger.clone()),
            ranks: Vec::new(),
            hang_timeout_ns: self.plan.hang_timeout_ns,
            sample_interval_ns: self.plan.sample_interval_ns,
        };
        // The bytes are written first, so that they are not in memory beside what is made of them.
        let written = self.write_evidence(&evidence);
        let count = self.ranks.len();
        evidence.ranks = std::mem::take(&mut self.ranks).decode();
        let mut verdict = judging::judge(&evidence);
        info!("incident {}: {count} ranks judged in {:.0?}", self.plan.incident, begun.elapsed());
        // They are given back before the stacks are written, unless memory is the only place where they are.
        let ranks = std::mem::take(&mut evidence.ranks);
        if !self.written {
            self.ranks.extend(ranks);
        }
        verdict.timing.status = Status::Open;
        verdict.timing.opened_at = Some(clock::rfc3339(self.plan.opened.unix_ns));
        verdict.timing.judged_at = Some(clock::rfc3339(Now::get().unix_ns));
        verdict.timing.errors.extend(errors);
        verdict.timing.errors.append(&mut self.errors);
        verdict.timing.errors.extend(written.err());
        verdict.timing.errors.extend(self.write_stacks(verdict.world_size));
        // By the wall clock, because the collector may have been started anew since.
        let since = Now::get().unix_ns.saturating_sub(self.plan.opened.unix_ns) + self.plan.late_ns;
        verdict.timing.seconds_from_timeout = Some(clock::seconds(since));
        if let Some(folder) = self.folder() {
            folder.release_reserve();
            write_verdict(&folder, &verdict);
        }
        verdict
    }

    fn write_evidence(&mut self, head: &Evidence) -> Result<(), String> {
        let Some(folder) = self.folder() else { return Err("no folder could be made".into()) };
        let result = folder.write_with(EVIDENCE, |to| self.ranks.write(head, to));
        self.written = result.is_ok();
        self.said(result)
    }

    fn write_stacks(&self, world_size: u32) -> Vec<String> {
        let Some(folder) = self.folder() else { return Vec::new() };
        // One after the other: of a large job each may be some hundred megabytes.
        let trees = || {
            let message = |tree: &PrefixTree| Some(tree.to_message());
            StackTrees { world_size, native: message(&self.native), python: message(&self.python) }.encode_to_vec()
        };
        let folded = |name: &str, tree| folder.write(name, folded::folded(tree, world_size).as_bytes());
        let results =
            [folder.write(TREES, &trees()), folded("cpp_stack", &self.native), folded("py_stack", &self.python)];
        results.into_iter().filter_map(|result| self.said(result).err()).collect()
    }

    fn folder(&self) -> Option<Folder> {
        self.plan.folder.clone().map(|path| Folder { path })
    }

    /// Logs an error, which is then the verdict's.
    fn said(&self, result: Result<(), Error>) -> Result<(), String> {
        result.map_err(|error| {
            let problem = chain(&error);
            warn!("incident {}: {problem}", self.plan.incident);
            problem
        })
    }

    /// Appends a piece; the hub has looked at the name.
    fn file(&mut self, piece: DumpFile) {
        use std::io::Write;
        let Some(folder) = self.plan.folder.as_ref().filter(|_| rank_of(&piece.name).is_some()) else { return };
        let path = folder.join(format!(".{}.new", piece.name));
        let mut write = || -> std::io::Result<()> {
            let file = match self.files.entry(piece.name.clone()) {
                std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::btree_map::Entry::Vacant(entry) => entry.insert(fs::File::create(&path)?),
            };
            file.write_all(&piece.data)?;
            if piece.last {
                self.files.remove(&piece.name);
                fs::rename(&path, folder.join(&piece.name))?;
            }
            Ok(())
        };
        if let Err(error) = write() {
            warn!("incident {}: {}: {error}", self.plan.incident, path.display());
            self.files.remove(&piece.name);
            // Half a file is none.
            let _ = fs::remove_file(&path);
        }
    }

    fn draw(&mut self) {
        let Some(folder) = self.folder() else { return };
        for name in std::mem::take(&mut self.files).into_keys() {
            let _ = fs::remove_file(folder.path.join(format!(".{name}.new")));
        }
        if let Err(problem) = viewer::run(&folder.path, VIEW) {
            warn!("incident {}: {problem}", self.plan.incident);
            let changed = crate::dump::change_verdict(&folder.path, |verdict| verdict.timing.errors.push(problem));
            if let Err(error) = changed {
                warn!("incident {}: {}", self.plan.incident, chain(&error));
            }
        }
        if let Err(error) = folder.link_latest() {
            warn!("incident {}: {}", self.plan.incident, chain(&error));
        }
    }
}

/// What a restarted cluster collector must know of an incident; written when it is opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Name of the incident.
    pub id: String,
    /// [`crate::registry::JobKey::name`].
    pub job: String,
    /// [`crate::registry::JobKey::instance`].
    pub instance: String,
    /// Attempt.
    pub attempt: u32,
    /// When it was opened.
    pub opened_unix_ns: u64,
    /// How long before that the timeout had run out.
    pub late_ns: u64,
    /// The trigger's message.
    pub trigger: Vec<u8>,
}

const RECORD: &str = ".cluster.json";
/// Only the newest folders are looked at for open incidents.
const NEWEST: usize = 200;

impl Record {
    /// Writes it.
    pub fn write(&self, folder: &Path) {
        let json = serde_json::to_vec(self).unwrap_or_default();
        if let Err(error) = (Folder { path: folder.into() }).write(RECORD, &json) {
            warn!("incident {}: a restarted cluster collector will not know it: {}", self.id, chain(&error));
        }
    }

    /// Incidents that an earlier cluster collector left open.
    #[must_use]
    pub fn open_in(root: &Path) -> Vec<Left> {
        let mut folders = crate::records::folders(root);
        folders.reverse();
        let of = |folder: PathBuf| {
            let record: Record = serde_json::from_slice(&fs::read(folder.join(RECORD)).ok()?).ok()?;
            let verdict = crate::records::verdict(&folder);
            let open = verdict.as_ref().is_none_or(|verdict| verdict.timing.status == Status::Open);
            open.then_some((folder, record, verdict))
        };
        folders.into_iter().take(NEWEST).filter_map(of).collect()
    }
}
