//! `xpu_timer_launch [--] command args…`: see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    xpu_timer_launch::main(std::env::args_os().skip(1).collect())
}
