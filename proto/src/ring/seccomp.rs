//! The number of seccomp filters of a thread.

/// The file with the random id of the machine's current boot.
pub const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The number of seccomp filters of a thread, from the bytes of its `/proc/PID/status`.
#[must_use]
pub fn filters(status: &[u8]) -> u32 {
    let field = |name: &[u8]| {
        let value = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name))?;
        std::str::from_utf8(value).ok()?.trim().parse::<u32>().ok()
    };
    // Kernels before 5.9 do not report the number.
    field(b"Seccomp_filters:").or_else(|| field(b"Seccomp:")).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::filters;

    #[test]
    fn filters_are_counted_where_the_kernel_says_how_many() {
        assert_eq!(filters(b"Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t3\nSpeculation:\t1\n"), 3);
        assert_eq!(filters(b"Name:\tx\nSeccomp:\t2\nSpeculation:\t1\n"), 2);
        assert_eq!(filters(b"Name:\tx\nSeccomp:\t0\nSeccomp_filters:\t0\n"), 0);
        assert_eq!((filters(b"Seccomp_filters:\tmany"), filters(b"")), (0, 0));
    }
}
