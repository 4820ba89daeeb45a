//! The table of all environment variables.

/// One variable of the table.
#[derive(Debug, Clone, Copy)]
pub struct Variable {
    /// Its name in the environment and in the INI file.
    pub name: &'static str,
    /// The value if it is not set; empty for none.
    pub default: &'static str,
    /// Its meaning, for `--help` and the documentation.
    pub meaning: &'static str,
    /// Whether the launcher sets it for the programs below it, so that users need not set it.
    pub is_set_by_launcher: bool,
}

macro_rules! variables {
    ($($name:ident = $default:literal, $meaning:literal $(set by $launcher:ident)?;)*) => {
        /// All variables, in the order of the documentation.
        pub const VARIABLES: &[Variable] = &[$(Variable {
            name: stringify!($name),
            default: $default,
            meaning: concat!($meaning $(, "; set by ", stringify!($launcher))?),
            is_set_by_launcher: !stringify!($($launcher)?).is_empty(),
        }),*];
    };
}

variables! {
    POD_NAME = "NOT_SET", "label pod_name";
    POD_IP = "NOT_SET", "label ip";
    XPU_TIMER_CONFIG = "", "INI file with any of these variables";
    XPU_TIMER_CONFIG_READ = "", "the settings in that file" set by xpu_timer_launch;
    XPU_TIMER_TIMELINE_PATH = "/root/timeline", "folder that holds the incident folders";
    XPU_TIMER_HANG_TIMEOUT = "300", "seconds that an operation may stay pending before an incident opens";
    XPU_TIMER_HANG_KILL = "0", "1: end the ranks with a non-zero status when a verdict proves a hang";
    XPU_TIMER_BASEPORT = "18888", "control port of the node collector; metrics are on the next one";
    XPU_TIMER_PORT = "", "metrics port; the control port is then the one below it";
    XPU_TIMER_DAEMON_PATH = "", "path of the collector binary";
    XPU_TIMER_LOGGING_DIR = "/tmp", "folder for the logs of the hook and the collector";
    XPU_TIMER_LOGGING_APPEND = "0", "1: keep the log of the previous run";
    XPU_TIMER_LOGGING_MAX_MB = "10", "megabytes after which the collector rotates its log";
    XPU_TIMER_LOGGING_FILES = "3", "number of log files that the collector keeps, including the current one";
    XPU_TIMER_FILE_MODE = "600", "mode of incident files and logs; 640 lets the group read them, 644 everybody";
    XPU_TIMER_PROMETHEUS_UPDATE_INTERVAL = "10", "seconds between two updates of a published kernel metric";
    XPU_TIMER_LOCAL_UPDATE_INTERVAL = "1", "seconds between two reads of the operations that the ranks have completed";
    XPU_TIMER_MM_BVAR_WINDOW_SIZE = "10", "seconds that the metrics of matrix products cover";
    XPU_TIMER_COLL_BVAR_WINDOW_SIZE = "10", "seconds that the metrics of collectives cover";
    XPU_TIMER_DEREGISTER_TIME = "300", "seconds after which a kernel metric without new values is removed";
    XPU_TIMER_BUCKETING_METRICS = "1", "0: omit the label level of kernel metrics";
    XPU_TIMER_MM_BUCKETING_COUNT = "10", "levels of matrix products, up to the peak of the device";
    XPU_TIMER_COMM_BUCKETING_COUNT = "20", "levels of collectives, up to 400 Gbps";
    XPU_TIMER_DEVICE_NAME = "", "device whose peak sets the levels of matrix products: P100, V100, A100, A800, H100, H800";
    XPU_TIMER_DISABLE = "0", "1: turn xpu_timer off";
    XPU_TIMER_COLLECTOR = "", "cluster collector, https://host:18890; unset: every node judges its own ranks";
    XPU_TIMER_COLLECTOR_TOKEN_FILE = "", "file with the token that nodes and the cluster collector share; it also gives access to a node's control port";
    XPU_TIMER_COLLECTOR_CA_FILE = "", "PEM file of the certificate authority that a node trusts; default: those of the system";
    XPU_TIMER_CLUSTER_LISTEN = "127.0.0.1:18890", "address of the cluster collector; beyond loopback it needs TLS and a token";
    XPU_TIMER_CLUSTER_CERT_FILE = "", "PEM file of the cluster collector's certificate";
    XPU_TIMER_CLUSTER_KEY_FILE = "", "PEM file of the key of that certificate";
    XPU_TIMER_TIMELINE_SECONDS = "120", "seconds of completed operations that the collector keeps of every rank for the timeline; 0: none";
    XPU_TIMER_SAMPLE_RATE = "2", "Python stacks of every rank's main thread that are sampled a second, without a stop; incidents and timelines have those of the last 120 seconds; at most 50; 0: none";
    XPU_TIMER_TIMELINE_MB = "64", "megabytes of memory for these operations, of all ranks of a node together; the oldest leave first";
    XPU_TIMER_TIMELINE_TRACE_COUNT = "1000", "operations of a rank that xpu_timer_dump_timeline records, if the request does not say";
    XPU_TIMER_ALL_DUMP_TIMELINE = "1", "0: of the ranks that xpu_timer_dump_timeline records, only rank 0 writes a .timeline.meta";
    XPU_TIMER_DUMP_STACK_COUNT = "0", "launches of a rank whose Python stacks are read: a timeline has the stack of the first launch of each kind; 0: none";
    XPU_TIMER_HOST_TRACING_FUNC = "", "Python functions whose calls are recorded, comma separated: module@object@function; CPython 3.8 and newer; see docs/timeline.md";
    XPU_TIMER_WEBHOOK = "", "URL to which every verdict is posted as JSON";
    XPU_TIMER_KEEP_INCIDENTS = "200", "number of incident folders to keep, for hangs, dumps on demand and promoted captures each; 0: all";
    XPU_TIMER_KEEP_DAYS = "30", "days after which an incident folder is removed; 0: never";
    XPU_TIMER_IDLE_TIMEOUT = "", "seconds without any launch on any rank after which the job is examined; 0: off; default: twice the hang timeout. If this variable is set, the job is reported even if it may be idle";
    XPU_TIMER_SAMPLE_INTERVAL = "5", "seconds between the two samples of a dump";
    XPU_TIMER_BRACKET = "collectives", "operations that get a start and an end event: collectives, matmuls, all, none";
    XPU_TIMER_SIGNAL_HANDLER = "0", "1: on a fatal signal, a rank waits for up to 0.2 s until the collector has read the stack of the failing thread";
    XPU_TIMER_EXIT_HOOK_PLUGIN = "", "Python files, comma separated, with functions that the collector calls for each rank that fails; see docs/failures.md";
    XPU_TIMER_INLINE = "auto", "code to replace where no symbol can be interposed; off: none; auto: gloo, and collectives and matrix products that are statically linked or bound to themselves; all: also the driver and the runtime";
    XPU_TIMER_NCCL_LIB_PATH = "", "path of the collective library, if its name is not one that the hook knows";
    XPU_TIMER_CUBLAS_LIB_PATH = "", "path of cuBLAS, if its name is not one that the hook knows";
    XPU_TIMER_CUBLASLT_LIB_PATH = "", "path of cuBLASLt, if its name is not one that the hook knows";
    XPU_TIMER_JOB = "", "job name; default: that of the scheduler";
    XPU_TIMER_SOCKET = "", "socket of the node collector" set by xpu_timer_launch;
    XPU_TIMER_COLLECTOR_PID = "", "process that may read the memory of the ranks and their children" set by xpu_timer_launch;
    XPU_TIMER_FILTERS = "", "seccomp filters in force at the start of the command, and the boot id of the machine" set by xpu_timer_launch;
    XPU_TIMER_LAUNCH_ID = "", "identity of the launched command that a process belongs to" set by xpu_timer_launch;
    XPU_TIMER_HOOK_PATH = "", "path of libxpu_timer_hook.so; default: beside the launcher, or in ../lib";
    XPU_TIMER_LINGER = "600", "seconds without a connected rank and without a running launched command before the collector ends";
    XPU_TIMER_LOG = "info", "how much the collector logs: error, warn, info, debug or trace, also for single modules: info,MODULE=debug";
}

/// Variables of the original tool that are accepted but have no effect; `meaning` gives the reason.
pub const WITHOUT_EFFECT: &[Variable] = &[
    without_effect("XPU_TIMER_DEBUG_MODE", "0", "a job also runs if it does not use every device"),
    without_effect(
        "XPU_TIMER_SKIP_TP",
        "0",
        "a bracket costs little, and a hang of an operation without a bracket cannot be detected",
    ),
    without_effect("XPU_TIMER_TP_SIZE", "8", "it belongs to XPU_TIMER_SKIP_TP"),
    without_effect("XPU_TIMER_TORCH_CUDA_LIB_PATH", "", "no function of libtorch_cuda is called"),
    without_effect("XPU_TIMER_SYMS_FILE", "", "functions are found without a symbol file"),
];

/// The variable in which the launcher passes on the INI file, so that no other process of the job
/// opens it. The value is the file's path, a line break, and the settings in INI format. It is
/// ignored if `XPU_TIMER_CONFIG` names another path.
pub const HANDED_OVER: &str = "XPU_TIMER_CONFIG_READ";

const fn without_effect(name: &'static str, default: &'static str, meaning: &'static str) -> Variable {
    Variable { name, default, meaning, is_set_by_launcher: false }
}
