//! Semaphores and message queues of System V. The kernel names the process that used each last.

use std::fs;

use xpu_timer_proto::server::{Awaited, AwaitedKind};

use super::search::Search;
use crate::memory;

/// What `semop` waits for. The process that changed the semaphore last has taken it.
#[allow(unsafe_code)]
pub(super) fn semaphore(search: &Search<'_>, set: u64, operations: u64) -> Option<Awaited> {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/ipc")).ok();
    if namespace("self")? != namespace(&search.pid.to_string())? {
        return None;
    }
    // `struct sembuf` begins with the number of the semaphore.
    let number = u16::from_ne_bytes(memory::read_exact(search.pid, operations, 2).ok()?.try_into().ok()?);
    // SAFETY: GETPID takes no fourth argument, and reads only kernel memory.
    let last = unsafe { libc::semctl(set as i32, i32::from(number), libc::GETPID) };
    let holders = search.holders((last > 0 && last != search.pid).then_some(last));
    let object = format!("semaphore {number} of set {set}");
    Some(Awaited { kind: AwaitedKind::Semaphore.into(), name: String::new(), holders, object })
}

/// What `msgrcv` or `msgsnd` waits for: the process that sent to the queue last, or the one that
/// received from it last.
pub(super) fn message_queue(search: &Search<'_>, id: u64, receives: bool) -> Option<Awaited> {
    // key msqid perms cbytes qnum lspid lrpid …
    let table = fs::read_to_string("/proc/sysvipc/msg").ok()?;
    let wanted = (id as i32).to_string();
    let line = table.lines().find(|line| line.split_whitespace().nth(1) == Some(&*wanted))?;
    let last: i32 = line.split_whitespace().nth(if receives { 5 } else { 6 })?.parse().ok()?;
    let holders = search.holders((last > 0 && last != search.pid).then_some(last));
    let object = format!("message queue {wanted}");
    Some(Awaited { kind: AwaitedKind::MessageQueue.into(), name: String::new(), holders, object })
}
