//! Finds and parses the values of the variables.

use std::{
    cell::RefCell,
    collections::HashMap,
    fmt, io,
    path::{Path, PathBuf},
    time::Duration,
};

use super::variables::{HANDED_OVER, VARIABLES, WITHOUT_EFFECT};
use crate::{
    file,
    printable::{MOST_NAME_BYTES, shortened},
    v1::RankInfo,
};

/// These must be greater than zero.
pub(super) const ABOVE_ZERO: [&str; 5] = [
    "XPU_TIMER_HANG_TIMEOUT",
    "XPU_TIMER_PROMETHEUS_UPDATE_INTERVAL",
    "XPU_TIMER_LOCAL_UPDATE_INTERVAL",
    "XPU_TIMER_MM_BVAR_WINDOW_SIZE",
    "XPU_TIMER_COLL_BVAR_WINDOW_SIZE",
];

/// Upper bound of a duration; longer means never. Twice this value plus a time still fits into 64
/// bits of nanoseconds.
pub const LONGEST: Duration = Duration::from_secs(u32::MAX as u64);

/// A value that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The variable, or the INI file.
    pub name: String,
    /// Its value.
    pub value: String,
    /// The value that is used instead.
    pub used: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={:?} cannot be used, using {:?} instead", self.name, self.value, self.used)
    }
}

type Lookup = dyn Fn(&str) -> Option<String>;

/// The source of all values.
pub struct Source {
    pub(super) environment: Box<Lookup>,
    ini: HashMap<String, String>,
    problems: RefCell<Vec<Problem>>,
}

impl Source {
    /// The environment of this process and the INI file that it names.
    #[must_use]
    pub fn process() -> Self {
        Self::with_ini(own_variable, |path| file::read_within(Path::new(path)))
    }

    /// An environment and the INI file that it names. The file's contents come from
    /// [`HANDED_OVER`], else from `read`.
    #[must_use]
    pub fn with_ini(
        environment: impl Fn(&str) -> Option<String> + 'static,
        read: impl Fn(&str) -> io::Result<Vec<u8>>,
    ) -> Self {
        let mut source = Self::new(environment, "");
        let Some(path) = source.text("XPU_TIMER_CONFIG") else { return source };
        let handed_over = source.text(HANDED_OVER);
        let handed_over = handed_over.as_deref().and_then(|text| text.strip_prefix(&path)?.strip_prefix('\n'));
        let not_text = |_| io::Error::new(io::ErrorKind::InvalidData, "not UTF-8 text");
        let text = match handed_over {
            Some(text) => Ok(text.to_string()),
            None => read(&path).and_then(|bytes| String::from_utf8(bytes).map_err(not_text)),
        };
        match text {
            Ok(ini) => source.ini = parse_ini(&ini, &path, &source.problems),
            Err(error) => source.problems.borrow_mut().push(Problem {
                name: "XPU_TIMER_CONFIG".into(),
                value: format!("{path}: {error}"),
                used: "the environment alone".into(),
            }),
        }
        source
    }

    /// The value of [`HANDED_OVER`] for a process whose INI file has the path `path`.
    #[must_use]
    pub fn hand_over(&self, path: &str) -> String {
        let known = VARIABLES.iter().chain(WITHOUT_EFFECT);
        let entries =
            known.filter_map(|variable| Some((variable.name, self.ini.get(&variable.name.to_ascii_lowercase())?)));
        entries.fold(format!("{path}\n"), |text, (name, value)| format!("{text}{name}={value}\n"))
    }

    /// An environment and the text of an INI file (empty for none).
    #[must_use]
    pub fn new(environment: impl Fn(&str) -> Option<String> + 'static, ini: &str) -> Self {
        let problems = RefCell::default();
        Source { ini: parse_ini(ini, "INI text", &problems), environment: Box::new(environment), problems }
    }

    /// The environment in the bytes of `/proc/PID/environ`.
    #[must_use]
    pub fn of_environ(bytes: &[u8]) -> Self {
        let variables: HashMap<String, String> = bytes
            .split(|byte| *byte == 0)
            .filter_map(|entry| String::from_utf8_lossy(entry).split_once('=').map(|(k, v)| (k.into(), v.into())))
            .collect();
        Self::new(move |name| variables.get(name).cloned(), "")
    }

    /// The value of a variable, or its default; `None` if that is empty.
    ///
    /// Variables of schedulers are not in [`VARIABLES`] and have no default.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<String> {
        let default =
            || VARIABLES.iter().find(|variable| variable.name == name).map(|variable| variable.default.to_string());
        self.given(name).or_else(default).filter(|value| !value.is_empty())
    }

    /// A path; see [`Source::text`].
    #[must_use]
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        self.text(name).map(PathBuf::from)
    }

    /// The files in `XPU_TIMER_EXIT_HOOK_PLUGIN`.
    #[must_use]
    pub fn exit_plugins(&self) -> Vec<PathBuf> {
        let list = self.text("XPU_TIMER_EXIT_HOOK_PLUGIN").unwrap_or_default();
        list.split(',').map(str::trim).filter(|path| !path.is_empty()).map(PathBuf::from).collect()
    }

    /// A number; `None` if it is not set and has no default.
    #[must_use]
    pub fn number<T: std::str::FromStr>(&self, name: &str) -> Option<T> {
        self.parsed(name, |text| text.parse().ok())
    }

    /// A duration in seconds, with or without a fraction; at most [`LONGEST`].
    #[must_use]
    pub fn seconds(&self, name: &str) -> Option<Duration> {
        let least = if ABOVE_ZERO.contains(&name) { Duration::from_millis(1) } else { Duration::ZERO };
        let duration = |text: &str| Duration::try_from_secs_f64(text.parse().ok()?).ok();
        self.parsed(name, |text| duration(text).filter(|duration| *duration >= least)).map(|given| given.min(LONGEST))
    }

    /// The number of levels of a label, up to a useful maximum.
    #[must_use]
    pub fn levels(&self, name: &str) -> u32 {
        self.parsed(name, |text| text.parse().ok().filter(|levels| (1..=1000).contains(levels))).unwrap_or(1)
    }

    /// A switch: 1, true, yes, on or 0, false, no, off.
    #[must_use]
    pub fn flag(&self, name: &str) -> bool {
        self.parsed(name, |text| match text.to_ascii_lowercase().as_str() {
            "1" | "true" | "yes" | "on" => Some(true),
            "0" | "false" | "no" | "off" => Some(false),
            _ => None,
        })
        .unwrap_or(false)
    }

    /// Mode of written files. The owner may always read and write them, and nobody else may write
    /// them.
    #[must_use]
    pub fn file_mode(&self) -> u32 {
        let mode = |text: &str| u32::from_str_radix(text, 8).ok();
        let allowed = |mode: &u32| mode & 0o600 == 0o600 && mode & !0o644 == 0;
        self.parsed("XPU_TIMER_FILE_MODE", |text| mode(text).filter(allowed)).unwrap_or(0o600)
    }

    /// Mode of created folders. Everyone who may read a file may also enter its folder.
    #[must_use]
    pub fn folder_mode(&self) -> u32 {
        let mode = self.file_mode();
        mode | (mode & 0o444) >> 2
    }

    /// The umask of a program that writes such files.
    #[must_use]
    pub fn umask(&self) -> u32 {
        0o777 & !self.folder_mode()
    }

    /// Size in bytes at which a log is rotated.
    #[must_use]
    pub fn log_bytes(&self) -> u64 {
        let bytes =
            |text: &str| Some((text.parse::<f64>().ok()? * 1e6).round()).filter(|bytes| (1e3..1e12).contains(bytes));
        self.parsed("XPU_TIMER_LOGGING_MAX_MB", bytes).unwrap_or(1e7) as u64
    }

    /// Number of logs that are kept, including the current one.
    #[must_use]
    pub fn log_files(&self) -> u32 {
        self.parsed("XPU_TIMER_LOGGING_FILES", |text| text.parse().ok().filter(|files| (1..=100).contains(files)))
            .unwrap_or(3)
    }

    /// Parses a value. If that fails, records a [`Problem`] and uses the default.
    pub fn parsed<T>(&self, name: &str, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
        let default = VARIABLES.iter().find(|variable| variable.name == name).map_or("", |variable| variable.default);
        let Some(text) = self.given(name) else { return parse(default) };
        let value = parse(text.trim());
        if value.is_none() && !text.trim().is_empty() {
            let used = if default.is_empty() { "the default".into() } else { default.into() };
            self.note(Problem { name: name.into(), value: shortened(&text, MOST_NAME_BYTES), used });
        }
        value.or_else(|| parse(default))
    }

    /// Records a problem once for each variable.
    fn note(&self, problem: Problem) {
        let mut problems = self.problems.borrow_mut();
        if !problems.contains(&problem) {
            problems.push(problem);
        }
    }

    /// The problems so far.
    #[must_use]
    pub fn problems(&self) -> Vec<Problem> {
        self.problems.borrow().clone()
    }

    /// The value of a variable in the environment, else in the INI file.
    pub(super) fn given(&self, name: &str) -> Option<String> {
        (self.environment)(name).or_else(|| self.ini.get(&name.to_ascii_lowercase()).cloned())
    }

    /// Control port of the node collector. Metrics are on the next port.
    #[must_use]
    pub fn control_port(&self) -> u16 {
        self.metrics_port().map_or_else(|| self.base_port(), |metrics| metrics - 1)
    }

    pub(super) fn metrics_port(&self) -> Option<u16> {
        self.parsed("XPU_TIMER_PORT", |text| text.parse::<u16>().ok().filter(|port| *port > 1))
    }

    pub(super) fn base_port(&self) -> u16 {
        let port = self.parsed("XPU_TIMER_BASEPORT", |text| text.parse::<u16>().ok().filter(|port| *port > 0));
        port.unwrap_or(18888)
    }

    /// Messages for the log about variables that are set but have no effect.
    #[must_use]
    pub fn without_effect(&self) -> Vec<String> {
        let given = WITHOUT_EFFECT.iter().filter(|variable| self.given(variable.name).is_some());
        given.map(|variable| format!("{} has no effect: {}", variable.name, variable.meaning)).collect()
    }

    /// The identity of this process in its job, from the variables of torchrun, Open MPI, PMI, PMIx
    /// and Slurm, in this order.
    ///
    /// `node`, `pid` and `command` stay empty, because they are not in the environment.
    #[must_use]
    pub fn rank_info(&self) -> RankInfo {
        // Rank, world size, local rank, local world size.
        const SCHEDULERS: [[&str; 4]; 5] = [
            ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
            [
                "OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_SIZE",
                "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE",
            ],
            ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
            ["PMIX_RANK", "", "", ""],
            SLURM,
        ];
        const SLURM: [&str; 4] = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""];
        const JOBS: [&str; 6] = [
            "XPU_TIMER_JOB",
            "ENV_ARGO_WORKFLOW_NAME",
            "ELASTIC_JOB_NAME",
            "TORCHELASTIC_RUN_ID",
            "PET_RDZV_ID",
            "SLURM_JOB_ID",
        ];
        let found = SCHEDULERS.iter().find_map(|names| self.number(names[0]).map(|rank: i32| (rank, names)));
        let mut info = RankInfo { rank: -1, local_rank: -1, ..Default::default() };
        if let Some((rank, names)) = found {
            // `srun --mpi=pmix` sets the rank in PMIx variables and the rest in Slurm's. A program
            // that mpirun starts in a batch script inherits Slurm's variables of the script, which
            // has no step.
            let step = self.given("SLURM_STEP_ID").is_some() && self.number(SLURM[0]) == Some(rank);
            let number = |which: usize| {
                let slurm = || step.then(|| self.number(SLURM[which])).flatten();
                self.number::<u32>(names[which]).or_else(slurm)
            };
            info.rank = rank.max(-1);
            info.world_size = number(1).unwrap_or(0);
            info.local_rank = number(2).and_then(|local| i32::try_from(local).ok()).unwrap_or(-1);
            info.local_world_size = number(3).unwrap_or(0);
        }
        info.attempt = self.number("TORCHELASTIC_RESTART_COUNT").unwrap_or(0);
        info.job = JOBS.iter().find_map(|name| self.short(name)).unwrap_or_default();
        info.pod_name = self.short("POD_NAME").unwrap_or_default();
        info.node = info.pod_name.clone();
        info.ip = self.short("POD_IP").unwrap_or_default();
        info.instance = self.instance();
        info
    }

    /// Distinguishes jobs of one name on one node, such as two runs of torchrun, which are both
    /// named `none`. It is torch's rendezvous, the PMIx namespace, or the Slurm step. It is equal
    /// on all ranks of a job, and empty if none is set.
    #[must_use]
    pub fn instance(&self) -> String {
        let torch = self.short("MASTER_PORT").map(|port| {
            let address = self.short("MASTER_ADDR").unwrap_or_default();
            shortened(&format!("{address}:{port}"), MOST_NAME_BYTES)
        });
        torch.or_else(|| self.short("PMIX_NAMESPACE")).or_else(|| self.short("SLURM_STEP_ID")).unwrap_or_default()
    }

    /// A name; see [`Source::text`]. It is cut to fit into a message, which records a [`Problem`].
    fn short(&self, name: &str) -> Option<String> {
        let text = self.text(name)?;
        let short = shortened(&text, MOST_NAME_BYTES);
        if short.len() < text.len() {
            self.note(Problem { name: name.into(), value: shortened(&text, 64), used: short.clone() });
        }
        Some(short)
    }
}

/// A variable of this process.
#[must_use]
pub fn own_variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Parses the keys of all sections, in lower case: the original tool's file has no sections.
fn parse_ini(text: &str, path: &str, problems: &RefCell<Vec<Problem>>) -> HashMap<String, String> {
    match configparser::ini::Ini::new().read(text.to_string()) {
        Ok(sections) => {
            sections.into_values().flatten().filter_map(|(key, value)| value.map(|value| (key, value))).collect()
        }
        Err(error) => {
            problems.borrow_mut().push(Problem {
                name: "XPU_TIMER_CONFIG".into(),
                value: format!("{path}: {error}"),
                used: "the environment alone".into(),
            });
            HashMap::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(pairs: &[(&str, &str)], ini: &str) -> Source {
        let map: HashMap<String, String> = pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        Source::new(move |name| map.get(name).cloned(), ini)
    }

    #[test]
    fn environment_beats_ini_beats_default() {
        let ini = "XPU_TIMER_HANG_TIMEOUT=7\nXPU_TIMER_BASEPORT = 20000\n";
        let source = source(&[("XPU_TIMER_HANG_TIMEOUT", "5")], ini);
        assert_eq!(source.seconds("XPU_TIMER_HANG_TIMEOUT"), Some(Duration::from_secs(5)));
        assert_eq!(source.control_port(), 20000);
        assert_eq!(source.seconds("XPU_TIMER_SAMPLE_INTERVAL"), Some(Duration::from_secs(5)));
        assert_eq!(source.problems(), []);
    }

    #[test]
    fn the_handed_over_configuration_applies_to_its_path_only() {
        let ini = "XPU_TIMER_HANG_TIMEOUT=7\n[section]\nxpu_timer_job = a=b: c\nOTHER=1\nXPU_TIMER_SKIP_TP=1\n";
        let path = |name: &str| (name == "XPU_TIMER_CONFIG").then(|| "/x.ini".to_string());
        let text = Source::with_ini(path, |_| Ok(ini.into())).hand_over("/x.ini");
        let given = |path: &'static str, text: &str| {
            let text = text.to_string();
            let environment = move |name: &str| match name {
                "XPU_TIMER_CONFIG" => Some(path.into()),
                HANDED_OVER => Some(text.clone()),
                _ => None,
            };
            Source::with_ini(environment, |_| Err(io::ErrorKind::NotFound.into()))
        };
        let source = given("/x.ini", &text);
        assert_eq!(source.seconds("XPU_TIMER_HANG_TIMEOUT"), Some(Duration::from_secs(7)));
        assert_eq!(source.text("XPU_TIMER_JOB").as_deref(), Some("a=b: c"));
        assert_eq!((source.without_effect().len(), source.problems()), (1, Vec::new()));
        assert_eq!(given("/y.ini", &text).problems().len(), 1, "another file is read");
        assert_eq!(given("/x.ini", "").problems().len(), 1);
    }

    #[test]
    fn a_bad_value_is_named_and_the_default_used() {
        let source = source(&[("XPU_TIMER_HANG_TIMEOUT", "soon"), ("XPU_TIMER_DISABLE", "maybe")], "");
        assert_eq!(source.seconds("XPU_TIMER_HANG_TIMEOUT"), Some(Duration::from_secs(300)));
        assert!(!source.flag("XPU_TIMER_DISABLE"));
        assert_eq!(
            source.problems().iter().map(ToString::to_string).collect::<Vec<_>>(),
            [
                "XPU_TIMER_HANG_TIMEOUT=\"soon\" cannot be used, using \"300\" instead",
                "XPU_TIMER_DISABLE=\"maybe\" cannot be used, using \"0\" instead",
            ]
        );
    }

    #[test]
    fn the_file_mode_is_private_by_default_and_may_allow_the_group() {
        for (text, file, folder, umask) in
            [("", 0o600, 0o700, 0o077), ("640", 0o640, 0o750, 0o027), ("0644", 0o644, 0o755, 0o022)]
        {
            let source = Source::new(move |_| Some(text.to_string()), "");
            assert_eq!((source.file_mode(), source.folder_mode(), source.umask()), (file, folder, umask), "{text}");
        }
        for text in ["666", "660", "400", "700", "rw", "8", "1600"] {
            let source = source(&[("XPU_TIMER_FILE_MODE", text)], "");
            assert_eq!(source.file_mode(), 0o600, "{text}");
            assert_eq!(source.problems().len(), 1, "{text}");
        }
    }

    #[test]
    fn negative_and_infinite_seconds_are_bad_values() {
        for text in ["-1", "inf", "nan", "1e300"] {
            let source = source(&[("XPU_TIMER_HANG_TIMEOUT", text)], "");
            assert_eq!(source.seconds("XPU_TIMER_HANG_TIMEOUT"), Some(Duration::from_secs(300)), "{text}");
            assert_eq!(source.problems().len(), 1, "{text}");
        }
    }

    #[test]
    fn very_long_timeouts_are_clamped() {
        for text in ["4294967295", "1e10", "1.8e19"] {
            let source = source(&[("XPU_TIMER_HANG_TIMEOUT", text)], "");
            let never = source.seconds("XPU_TIMER_HANG_TIMEOUT").unwrap();
            assert_eq!((never, source.problems()), (LONGEST, Vec::new()), "{text}");
            assert!(u64::try_from((never * 2).as_nanos()).is_ok());
        }
    }

    #[test]
    fn variables_without_effect_are_reported_when_set() {
        let source = source(&[("XPU_TIMER_SKIP_TP", "1"), ("XPU_TIMER_HANG_TIMEOUT", "3")], "XPU_TIMER_DEBUG_MODE=1\n");
        let problems = source.without_effect();
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].starts_with("XPU_TIMER_DEBUG_MODE has no effect: "), "{problems:?}");
        assert_eq!(source.problems(), [], "and does not count as a problem");
        assert!(WITHOUT_EFFECT.iter().all(|one| VARIABLES.iter().all(|other| one.name != other.name)));
    }

    #[test]
    fn ranks_come_from_every_scheduler() {
        let torch = source(&[("RANK", "3"), ("WORLD_SIZE", "8"), ("OMPI_COMM_WORLD_RANK", "1")], "").rank_info();
        assert_eq!((torch.rank, torch.world_size), (3, 8));
        let mpi = source(&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")], "").rank_info();
        assert_eq!((mpi.rank, mpi.world_size), (1, 2));
        let slurm = Source::of_environ(b"SLURM_PROCID=5\0SLURM_NTASKS=6\0SLURM_JOB_ID=99\0").rank_info();
        assert_eq!((slurm.rank, slurm.world_size, slurm.job.as_str()), (5, 6, "99"));
        let pmix = [("PMIX_RANK", "5"), ("SLURM_PROCID", "5"), ("SLURM_NTASKS", "6"), ("SLURM_LOCALID", "1")];
        let script = source(&pmix, "").rank_info();
        assert_eq!((script.rank, script.world_size, script.local_rank), (5, 0, -1), "a batch script's variables");
        let step = source(&[&pmix[..], &[("SLURM_STEP_ID", "0")]].concat(), "").rank_info();
        assert_eq!((step.rank, step.world_size, step.local_rank), (5, 6, 1));
        let other = source(&[("PMIX_RANK", "2"), ("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0")], "").rank_info();
        assert_eq!((other.rank, other.world_size), (2, 0), "the variables of the daemon of mpirun");
        assert_eq!(source(&[], "").rank_info().rank, -1);
    }

    #[test]
    fn long_names_are_shortened_and_reported_once() {
        let name = |end: &str| format!("{}{end}", "n".repeat(100_000));
        let of = |job: String| {
            let source = source(&[("XPU_TIMER_JOB", &job), ("POD_NAME", &name("p")), ("MASTER_PORT", &name("0"))], "");
            let _ = source.rank_info();
            (source.rank_info(), source.problems())
        };
        let ((one, problems), (other, _)) = (of(name("a")), of(name("b")));
        assert_ne!(one.job, other.job);
        for text in [&one.job, &one.pod_name, &one.node, &one.instance] {
            assert!(text.len() <= MOST_NAME_BYTES && text.contains('…'), "{text}");
        }
        let names: Vec<&str> = problems.iter().map(|problem| problem.name.as_str()).collect();
        assert_eq!(names, ["XPU_TIMER_JOB", "POD_NAME", "MASTER_PORT"]);
        assert!(problems.iter().all(|problem| problem.to_string().len() < 400), "{problems:?}");
    }

    #[test]
    fn impossible_rank_numbers_are_ignored() {
        for rank in ["4000000000", "99999999999999999999", "-7", "two", ""] {
            let info = source(&[("RANK", rank), ("WORLD_SIZE", "4")], "").rank_info();
            assert_eq!(info.rank, -1, "{rank}");
        }
        let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
        for number in ["-1", "many", "18446744073709551616"] {
            let pairs = names.map(|name| (name, if name == "RANK" { "3" } else { number }));
            let info = source(&pairs, "").rank_info();
            assert_eq!((info.rank, info.world_size, info.local_rank, info.local_world_size), (3, 0, -1, 0), "{number}");
        }
        assert_eq!(source(&[("RANK", "1"), ("WORLD_SIZE", "4000000000")], "").rank_info().world_size, 4_000_000_000);
    }

    #[test]
    fn the_instance_comes_from_the_rendezvous_or_the_scheduler() {
        assert_eq!(source(&[("MASTER_ADDR", "h"), ("MASTER_PORT", "29500")], "").instance(), "h:29500");
        assert_eq!(source(&[("PMIX_NAMESPACE", "prterun-1")], "").instance(), "prterun-1");
        assert_eq!(source(&[("PATH", "/bin")], "").instance(), "");
    }

    #[test]
    fn the_metrics_port_decides_the_control_port() {
        assert_eq!(source(&[("XPU_TIMER_PORT", "19001")], "").control_port(), 19000);
        assert_eq!(source(&[], "").control_port(), 18888);
    }
}
