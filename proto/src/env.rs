//! All environment variables that xpu_timer reads. The value comes from the environment, else from
//! the INI file that `XPU_TIMER_CONFIG` names, else from the default in [`VARIABLES`].
//!
//! Each program's `config.rs` builds its typed settings from a [`Source`]. An invalid value never
//! stops a program: the default is used, and a [`Problem`] reports it.

mod settings;
mod source;
mod variables;

pub use settings::{Origin, Setting};
pub use source::{LONGEST, Problem, Source, own_variable};
pub use variables::{HANDED_OVER, VARIABLES, Variable, WITHOUT_EFFECT};
