//! The evidence of one incident as it comes from the nodes: merged on a thread of its own, judged, and written into the folder.
//! Never more than the merged whole and the parts in flight are in memory.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use tracing::{info, warn};
use xpu_timer_analysis::{Status, Verdict, folded, judge, prefix_tree::PrefixTree};
use xpu_timer_proto::{
    Message as _,
    v1::{DumpFile, Evidence, NodeDump, RankEvidence, StackTrees, Trigger},
};

use crate::{
    clock::{self, Now},
    delivery::rank_of,
    dump::write_verdict,
    error::{Error, chain},
    folder::Folder,
    viewer,
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
}

/// What the thread is given to do.
#[derive(Debug)]
pub enum Work {
    /// A part of a node's dump.
    Part(Box<NodeDump>),
    /// All that will come in time has come. Ranks of which nothing came, with the reason, and what else went wrong.
    Judge(Vec<RankEvidence>, Vec<String>),
    /// A piece of a `.stacktrace` file.
    File(Box<DumpFile>),
    /// No more files: draw.
    Draw,
}

/// What the thread tells.
#[derive(Debug)]
pub enum Done {
    /// The verdict is made and written.
    Judged(Box<Verdict>),
    /// The pictures and the report are drawn, or could not be.
    Drawn,
}

/// All stacks of the job, merged.
pub const TREES: &str = "stacks.bin";
/// Room is made beforehand for no more ranks than this, whatever a node says.
const LARGEST_WORLD: u32 = 1 << 18;
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
    errors: Vec<String>,
    files: BTreeMap<String, fs::File>,
}

/// What is known of each rank; of a large job this is most of the memory.
#[derive(Default)]
struct Ranks {
    list: Vec<RankEvidence>,
    places: HashMap<u32, usize>,
}

impl Ranks {
    fn of(list: Vec<RankEvidence>) -> Self {
        let places = list.iter().enumerate().map(|(place, rank)| (rank.rank, place)).collect();
        Ranks { list, places }
    }

    /// Makes room for the ranks of a job, for as many as can be believed.
    fn reserve(&mut self, world_size: u32) {
        self.list.reserve_exact((world_size.min(LARGEST_WORLD) as usize).saturating_sub(self.list.len()));
    }

    fn holds(&self, rank: u32) -> bool {
        self.places.contains_key(&rank)
    }

    /// Adds ranks; one that is there already is replaced.
    fn extend(&mut self, ranks: Vec<RankEvidence>) {
        for mut rank in ranks {
            if let Some(flight) = &mut rank.flight {
                flight.operations.shrink_to_fit();
            }
            match self.places.get(&rank.rank) {
                Some(place) => self.list[*place] = rank,
                None => {
                    self.places.insert(rank.rank, self.list.len());
                    self.list.push(rank);
                }
            }
        }
    }

    fn sorted(mut self) -> Vec<RankEvidence> {
        self.list.sort_unstable_by_key(|rank| rank.rank);
        self.list
    }
}

impl Gather {
    /// Goes on with what an earlier gathering of the same incident has written.
    fn new(plan: Plan) -> Self {
        let mut gather = Gather {
            native: PrefixTree::new(),
            python: PrefixTree::new(),
            ranks: Ranks::default(),
            errors: Vec::new(),
            files: BTreeMap::new(),
            plan,
        };
        let read = |name: &str| fs::read(gather.plan.folder.as_ref()?.join(name)).ok();
        let evidence = read("evidence.bin").and_then(|bytes| Evidence::decode(&bytes[..]).ok());
        let trees = read(TREES).and_then(|bytes| StackTrees::decode(&bytes[..]).ok());
        if let (Some(evidence), Some(trees)) = (evidence, trees) {
            gather.ranks = Ranks::of(evidence.ranks);
            gather.merge(trees.native.as_ref(), trees.python.as_ref());
        }
        gather
    }

    fn run(mut self, work: &mpsc::Receiver<Work>, tell: &impl Fn(Done)) {
        for item in work {
            match item {
                Work::Part(part) => self.part(*part),
                Work::Judge(missing, errors) => tell(Done::Judged(Box::new(self.judge(missing, errors)))),
                Work::File(file) => self.file(*file),
                Work::Draw => {
                    self.draw();
                    tell(Done::Drawn);
                }
            }
        }
    }

    fn part(&mut self, part: NodeDump) {
        self.merge(part.native.as_ref(), part.python.as_ref());
        self.errors.extend(part.errors);
        // All of them at once: a list that grows piece by piece is copied again and again, and keeps room that it does not need.
        self.ranks.reserve(self.plan.world_size);
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
        let missing = missing.into_iter().filter(|rank| !self.ranks.holds(rank.rank)).collect::<Vec<_>>();
        self.ranks.extend(missing);
        let evidence = Evidence {
            incident: self.plan.incident.clone(),
            job: self.plan.job.clone(),
            world_size: self.plan.world_size,
            attempt: self.plan.attempt,
            trigger: Some(self.plan.trigger.clone()),
            ranks: std::mem::take(&mut self.ranks).sorted(),
            hang_timeout_ns: self.plan.hang_timeout_ns,
            sample_interval_ns: self.plan.sample_interval_ns,
        };
        let mut verdict = judge(&evidence);
        info!("incident {}: {} ranks judged in {:.0?}", self.plan.incident, evidence.ranks.len(), begun.elapsed());
        verdict.timing.status = Status::Open;
        verdict.timing.opened_at = Some(clock::rfc3339(self.plan.opened.unix_ns));
        verdict.timing.judged_at = Some(clock::rfc3339(Now::get().unix_ns));
        verdict.timing.errors.extend(errors);
        verdict.timing.errors.append(&mut self.errors);
        // By the wall clock, because the collector may have been started anew since.
        let since = Now::get().unix_ns.saturating_sub(self.plan.opened.unix_ns) + self.plan.late_ns;
        verdict.timing.seconds_from_timeout = Some(clock::seconds(since));
        self.write(&evidence, &mut verdict);
        self.ranks = Ranks::of(evidence.ranks);
        verdict
    }

    fn write(&self, evidence: &Evidence, verdict: &mut Verdict) {
        let Some(path) = self.plan.folder.clone() else {
            verdict.timing.errors.push("no folder could be made".into());
            return;
        };
        let folder = Folder { path };
        let world = verdict.world_size;
        let trees = StackTrees {
            world_size: world,
            native: Some(self.native.to_message()),
            python: Some(self.python.to_message()),
        };
        // One after the other: of a large job each is some hundred megabytes.
        self.note(folder.write(TREES, &trees.encode_to_vec()), verdict);
        drop(trees);
        self.note(folder.write("evidence.bin", &evidence.encode_to_vec()), verdict);
        for (name, tree) in [("cpp_stack", &self.native), ("py_stack", &self.python)] {
            self.note(folder.write(name, folded::folded(tree, world).as_bytes()), verdict);
        }
        folder.release_reserve();
        write_verdict(&folder, verdict);
    }

    fn note(&self, result: Result<(), Error>, verdict: &mut Verdict) {
        if let Err(error) = result {
            let problem = chain(&error);
            warn!("incident {}: {problem}", self.plan.incident);
            verdict.timing.errors.push(problem);
        }
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
        let Some(path) = self.plan.folder.clone() else { return };
        for name in std::mem::take(&mut self.files).into_keys() {
            let _ = fs::remove_file(path.join(format!(".{name}.new")));
        }
        let folder = Folder { path };
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

    /// Incidents that an earlier cluster collector left open: folder, record, and the verdict when there is one.
    #[must_use]
    pub fn open_in(root: &Path) -> Vec<(PathBuf, Record, Option<Verdict>)> {
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
