//! All environment variables that xpu_timer reads. The value comes from the environment, else from
//! the INI file that `XPU_TIMER_CONFIG` names, else from the default in [`VARIABLES`].
//!
//! Each program's `config.rs` builds its typed settings from a [`Source`]. An invalid value never
//! stops a program: the default is used, and a [`Problem`] reports it. [`Source::settings`] has the
//! effective settings: the value of each variable, its origin, and its problem, for reports.

mod source;
mod variables;

pub use source::{LONGEST, Problem, Source, own_variable};
pub use variables::{HANDED_OVER, VARIABLES, Variable, WITHOUT_EFFECT};

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The environment.
    Environment,
    /// The INI file that `XPU_TIMER_CONFIG` names.
    Ini,
    /// The default: it is set nowhere.
    Default,
}

/// The effective setting of one variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// Its name.
    pub name: &'static str,
    /// Its meaning.
    pub meaning: &'static str,
    /// The effective value; empty for none.
    pub value: String,
    /// Its default; empty for none.
    pub default: &'static str,
    /// Where the value was set, even if it cannot be used and the default is effective.
    pub origin: Origin,
    /// Why the set value is not effective.
    pub problem: Option<Problem>,
}

/// The type of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Flag,
    Seconds,
    Number,
    Levels,
    Port,
    Choice(&'static [&'static str]),
    FileMode,
    LogBytes,
    LogFiles,
}

fn kind(name: &str) -> Kind {
    match name {
        "XPU_TIMER_HANG_TIMEOUT"
        | "XPU_TIMER_IDLE_TIMEOUT"
        | "XPU_TIMER_SAMPLE_INTERVAL"
        | "XPU_TIMER_PROMETHEUS_UPDATE_INTERVAL"
        | "XPU_TIMER_LOCAL_UPDATE_INTERVAL"
        | "XPU_TIMER_MM_BVAR_WINDOW_SIZE"
        | "XPU_TIMER_COLL_BVAR_WINDOW_SIZE"
        | "XPU_TIMER_TIMELINE_SECONDS"
        | "XPU_TIMER_DEREGISTER_TIME" => Kind::Seconds,
        "XPU_TIMER_HANG_KILL"
        | "XPU_TIMER_LOGGING_APPEND"
        | "XPU_TIMER_DISABLE"
        | "XPU_TIMER_SIGNAL_HANDLER"
        | "XPU_TIMER_ALL_DUMP_TIMELINE"
        | "XPU_TIMER_BUCKETING_METRICS" => Kind::Flag,
        "XPU_TIMER_MM_BUCKETING_COUNT" | "XPU_TIMER_COMM_BUCKETING_COUNT" => Kind::Levels,
        "XPU_TIMER_LINGER"
        | "XPU_TIMER_KEEP_INCIDENTS"
        | "XPU_TIMER_KEEP_DAYS"
        | "XPU_TIMER_SAMPLE_RATE"
        | "XPU_TIMER_TIMELINE_MB"
        | "XPU_TIMER_TIMELINE_TRACE_COUNT"
        | "XPU_TIMER_DUMP_STACK_COUNT"
        | "XPU_TIMER_COLLECTOR_PID" => Kind::Number,
        "XPU_TIMER_BASEPORT" | "XPU_TIMER_PORT" => Kind::Port,
        "XPU_TIMER_FILE_MODE" => Kind::FileMode,
        "XPU_TIMER_LOGGING_MAX_MB" => Kind::LogBytes,
        "XPU_TIMER_LOGGING_FILES" => Kind::LogFiles,
        "XPU_TIMER_BRACKET" => Kind::Choice(&["collectives", "matmuls", "all", "none"]),
        "XPU_TIMER_INLINE" => Kind::Choice(&["off", "0", "auto", "all"]),
        _ => Kind::Text,
    }
}

impl Source {
    /// The problems of all variables of the table, including those that this program does not read.
    #[must_use]
    pub fn all_problems(&self) -> Vec<Problem> {
        VARIABLES.iter().for_each(|variable| self.check(variable.name));
        self.problems()
    }

    /// All variables of the table.
    #[must_use]
    pub fn settings(&self) -> Vec<Setting> {
        VARIABLES.iter().map(|variable| self.setting(variable)).collect()
    }

    fn setting(&self, variable: &'static Variable) -> Setting {
        let name = variable.name;
        self.check(name);
        let problem = self.problems().into_iter().find(|problem| problem.name == name);
        let origin = match () {
            () if (self.environment)(name).is_some() => Origin::Environment,
            () if self.given(name).is_some() => Origin::Ini,
            () => Origin::Default,
        };
        let value = if problem.is_some() { variable.default.into() } else { self.text(name).unwrap_or_default() };
        Setting { name, meaning: variable.meaning, value, default: variable.default, origin, problem }
    }

    /// Records a [`Problem`] of a variable that is read elsewhere. The value itself is ignored.
    pub fn check(&self, name: &str) {
        match kind(name) {
            Kind::Text => {}
            Kind::Flag => _ = self.flag(name),
            Kind::Seconds => _ = self.seconds(name),
            Kind::Number => _ = self.number::<u64>(name),
            Kind::Levels => _ = self.levels(name),
            Kind::Port if name == "XPU_TIMER_BASEPORT" => _ = self.base_port(),
            Kind::Port => _ = self.metrics_port(),
            Kind::FileMode => _ = self.file_mode(),
            Kind::LogBytes => _ = self.log_bytes(),
            Kind::LogFiles => _ = self.log_files(),
            Kind::Choice(words) => _ = self.parsed(name, |text| words.contains(&text).then_some(())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::source::ABOVE_ZERO;
    use super::*;

    fn setting(pairs: &'static [(&str, &str)], ini: &str, name: &str) -> Setting {
        let find = move |name: &str| pairs.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_string());
        Source::new(find, ini).settings().into_iter().find(|setting| setting.name == name).unwrap()
    }

    #[test]
    fn a_setting_has_a_value_an_origin_and_a_default() {
        let ini = "XPU_TIMER_HANG_TIMEOUT=7\nXPU_TIMER_BASEPORT=20000\n";
        let of = |name| {
            let setting = setting(&[("XPU_TIMER_HANG_TIMEOUT", "5")], ini, name);
            (setting.value, setting.origin, setting.problem)
        };
        assert_eq!(of("XPU_TIMER_HANG_TIMEOUT"), ("5".into(), Origin::Environment, None));
        assert_eq!(of("XPU_TIMER_BASEPORT"), ("20000".into(), Origin::Ini, None));
        assert_eq!(of("XPU_TIMER_SAMPLE_INTERVAL"), ("5".into(), Origin::Default, None));
        assert_eq!(of("XPU_TIMER_COLLECTOR"), (String::new(), Origin::Default, None));
    }

    #[test]
    fn a_bad_value_is_reported_and_the_default_applies() {
        const PAIRS: &[(&str, &str)] = &[
            ("XPU_TIMER_HANG_TIMEOUT", "soon"),
            ("XPU_TIMER_DISABLE", "maybe"),
            ("XPU_TIMER_BASEPORT", "70000"),
            ("XPU_TIMER_BRACKET", "everything"),
            ("XPU_TIMER_LINGER", "-1"),
        ];
        for (name, bad) in PAIRS {
            let setting = setting(PAIRS, "", name);
            assert_eq!((setting.value.as_str(), setting.origin), (setting.default, Origin::Environment), "{name}");
            assert_eq!(setting.problem.unwrap().value, *bad);
        }
        let source = Source::new(|name| PAIRS.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_string()), "");
        // A variable that was read before is still reported only once.
        assert!(
            !source.flag("XPU_TIMER_DISABLE")
                && source.settings().iter().filter(|one| one.problem.is_some()).count() == 5
        );
        assert_eq!(source.all_problems().len(), PAIRS.len());
    }

    /// Every variable that is not free text, with values that are certainly mistakes.
    #[test]
    fn every_variable_reports_a_bad_value() {
        let mut checked = 0;
        for variable in VARIABLES {
            let bad: &[&'static str] = match kind(variable.name) {
                Kind::Text => continue,
                Kind::Flag => &["maybe", "2", "-1"],
                Kind::Seconds if ABOVE_ZERO.contains(&variable.name) => &["soon", "-1", "nan", "5s", "0", "0.0"],
                Kind::Seconds => &["soon", "-1", "nan", "5s"],
                Kind::Number => &["many", "-1", "1.5"],
                Kind::Levels => &["many", "-1", "1.5", "0", "5000"],
                Kind::Port => &["http", "-1", "70000", "0"],
                Kind::Choice(_) => &["sometimes", "All of them"],
                Kind::FileMode => &["rw", "660", "666", "400", "8"],
                Kind::LogBytes => &["many", "-1", "0", "nan"],
                Kind::LogFiles => &["many", "-1", "0", "1.5", "1000"],
            };
            for value in bad {
                let source = Source::new(move |name| (name == variable.name).then(|| (*value).to_string()), "");
                let of_all = source.settings();
                let setting = of_all.into_iter().find(|setting| setting.name == variable.name).unwrap();
                let problem = setting.problem.unwrap_or_else(|| panic!("{}={value} was taken", variable.name));
                assert_eq!((problem.name.as_str(), problem.value.as_str()), (variable.name, *value));
                assert_eq!(setting.value, variable.default, "the default is in force");
                assert_eq!(source.problems().iter().filter(|other| other.name == variable.name).count(), 1);
                checked += 1;
            }
        }
        assert!(checked > 60, "{checked}");
    }

    #[test]
    fn every_default_is_a_valid_value() {
        let source = Source::new(|_| None, "");
        assert!(source.settings().iter().all(|setting| setting.problem.is_none()));
        // A number, a switch or a port that is not checked would never be reported.
        let unchecked =
            |variable: &&Variable| kind(variable.name) == Kind::Text && variable.default.parse::<f64>().is_ok();
        let names: Vec<&str> = VARIABLES.iter().filter(unchecked).map(|variable| variable.name).collect();
        assert_eq!(names, [""; 0]);
    }
}
