//! Real PyTorch, the CUDA build of PyPI, with its own ProcessGroupNCCL on the simulated device:
//! what it launches is seen once, and a hang is judged rightly. `cargo xtask test --torch` runs
//! these alone.

mod counts;
mod hangs;
mod metrics;

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
};

use xpu_timer_tests::{Incident, Job, Process, PypiTorch, skip, tree};

const RANKS: u32 = 4;

/// A job of PyPI's torch. There is one at a time: four ranks keep a small machine busy for many
/// seconds.
struct Torch {
    torch: PypiTorch,
    job: Job,
    _turn: MutexGuard<'static, ()>,
}

/// PyPI's torch, for whose turn it is; nothing when it cannot be set up.
pub fn pypi() -> Option<(PypiTorch, MutexGuard<'static, ()>)> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match PypiTorch::set_up() {
        Ok(torch) => Some((torch, turn)),
        Err(error) => {
            skip(&format!("{error:#}"));
            None
        }
    }
}

impl Torch {
    /// A job whose ranks hang soon and find each other at a port of their own.
    fn new() -> Option<Self> {
        let (torch, turn) = pypi()?;
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr()).unwrap().port();
        let libraries = torch.library_path().expect("the libraries of stubs").into_string().unwrap();
        let job = Job::new()
            .with("LD_LIBRARY_PATH", &libraries)
            .with("MASTER_ADDR", "127.0.0.1")
            .with("MASTER_PORT", &port.to_string())
            .with("OMP_NUM_THREADS", "1")
            // The ranks meet before their first collective, and then run in step, but two cores are
            // few for them.
            .with("XPU_TIMER_HANG_TIMEOUT", "8")
            .with("XPU_TIMER_SAMPLE_INTERVAL", "1")
            .with("XPU_TIMER_LINGER", "120");
        Some(Torch { torch, job, _turn: turn })
    }

    /// Adds the words that start the ranks of an example to a command of this Python.
    fn words(command: &mut Command, ranks: u32, script: &str, arguments: &[&str]) {
        let examples = tree().join("tests/examples");
        command.arg(examples.join("run_ranks.py")).arg(format!("--nproc={ranks}"));
        command.arg(examples.join(script)).args(arguments);
    }

    /// The ranks under the launcher.
    fn launch(&self, script: &str, arguments: &[&str]) -> Process {
        let mut command = self.job.launch(self.torch.python());
        Self::words(&mut command, RANKS, script, arguments);
        Process::spawn(&mut command)
    }
}

fn text(incident: &Incident) -> String {
    fs::read_to_string(incident.path.join("verdict.txt")).expect("every incident has a verdict.txt")
}
