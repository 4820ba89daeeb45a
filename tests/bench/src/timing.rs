//! Repetitions and medians, and the resources that a process uses.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::{time::ClockId, unistd::Pid};
use xpu_timer_proto::procfs;

/// One of the compared programs or variants.
pub type Contender<'a> = (&'a str, Box<dyn FnMut() -> Result<Duration> + 'a>);

/// Runs all contenders in turn for `repetitions` rounds. Returns the median of each in the given
/// order. Taking turns spreads a busy moment of the machine over all of them.
pub fn alternate(repetitions: usize, contenders: &mut [Contender<'_>]) -> Result<Vec<Duration>> {
    let mut times: Vec<Vec<Duration>> = vec![Vec::new(); contenders.len()];
    for _ in 0..repetitions {
        for ((_, run), times) in contenders.iter_mut().zip(&mut times) {
            times.push(run()?);
        }
    }
    Ok(times.into_iter().map(median).collect())
}

/// The median; for an even number, the upper of the two middle values.
pub fn median<T: Ord + Copy>(mut values: Vec<T>) -> T {
    values.sort_unstable();
    values[values.len() / 2]
}

/// How long something takes.
pub fn time<T>(run: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let result = run();
    (start.elapsed(), result)
}

/// Peak of the resident memory of a process.
pub fn peak_bytes(pid: i32) -> Result<f64> {
    let status = procfs::status_text(pid)?;
    let peak = procfs::field(&status, "VmHWM:").context("VmHWM")?;
    let kib: f64 = peak.trim_end_matches(" kB").parse()?;
    Ok(kib * 1024.0)
}

/// Processor time that a process has used so far.
pub fn processor_time(pid: i32) -> Result<Duration> {
    Ok(ClockId::pid_cpu_clock_id(Pid::from_raw(pid))?.now()?.into())
}

/// Milliseconds for a table.
pub fn ms(time: Duration) -> String {
    let ms = time.as_secs_f64() * 1e3;
    if ms < 10.0 { format!("{ms:.2} ms") } else { format!("{ms:.0} ms") }
}

/// How many times longer theirs takes.
pub fn ratio(theirs: Duration, ours: Duration) -> f64 {
    theirs.as_secs_f64() / ours.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_and_medians() {
        let mut order = std::cell::RefCell::new(Vec::new());
        let mut slow = [9, 1, 5].into_iter();
        let mut contenders: [Contender<'_>; 2] = [
            (
                "a",
                Box::new(|| {
                    order.borrow_mut().push('a');
                    Ok(Duration::from_millis(slow.next().unwrap()))
                }),
            ),
            (
                "b",
                Box::new(|| {
                    order.borrow_mut().push('b');
                    Ok(Duration::from_millis(2))
                }),
            ),
        ];
        let medians = alternate(3, &mut contenders).unwrap();
        drop(contenders);
        assert_eq!(medians, [Duration::from_millis(5), Duration::from_millis(2)]);
        assert_eq!(order.get_mut().iter().collect::<String>(), "ababab");
    }
}
