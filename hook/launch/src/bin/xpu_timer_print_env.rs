//! `xpu_timer_print_env [--json] [--pid N | [--] program args…]`: see `print_env` in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    xpu_timer_launch::print_env(std::env::args_os().skip(1).collect())
}
