//! The metrics: their settings, what the operations in the rings of the ranks mean, the series and
//! comparisons made from them, and the Prometheus text format, version 0.0.4.

pub(crate) mod cursor;
pub(crate) mod meaning;
pub(crate) mod pace;
pub(crate) mod sampler;
pub(crate) mod series;
pub(crate) mod slow_ranks;

use std::{
    fmt::{Display, Write},
    fs,
    path::Path,
    time::Duration,
};

use xpu_timer_proto::{env::Source, printable};

/// The labels of a sample, in the order in which they are written.
pub(crate) type Labels = Vec<(&'static str, String)>;

/// A page under construction. Each family is written once, with all its samples.
#[derive(Default)]
pub(crate) struct Page(String);

impl Page {
    /// Begins a family, which may remain without samples.
    pub(crate) fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing into a String cannot fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// Adds a sample to the current family.
    pub(crate) fn sample(&mut self, name: &str, labels: &[(&str, String)], value: impl Display) {
        let _ = write!(self.0, "{name}");
        for (index, (label, text)) in labels.iter().enumerate() {
            let open = if index == 0 { '{' } else { ',' };
            let _ = write!(self.0, "{open}{label}=\"{}\"", escape(text));
        }
        let close = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.0, "{close} {value}");
    }

    /// The finished text.
    #[must_use]
    pub(crate) fn text(self) -> String {
        self.0
    }
}

/// The format escapes backslash, quote and newline in a label value.
fn escape(text: &str) -> String {
    printable::text(text).replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Settings of the kernel metrics.
#[derive(Debug, Clone)]
pub struct MetricsSettings {
    /// Time between two reads of the rings.
    pub look: Duration,
    /// Time after which a published value is recomputed.
    pub publish: Duration,
    /// Window of the metrics of collectives.
    pub collective_window: Duration,
    /// Window of the metrics of matrix products.
    pub matmul_window: Duration,
    /// Time after which an inactive series is removed.
    pub silence: Duration,
    /// Number of levels of collectives and of matrix products; `None` for no level label.
    pub levels: Option<(u32, u32)>,
    /// The device whose peak performance defines the levels of matrix products.
    pub device: String,
}

/// Where NVIDIA's kernel module lists the devices of the machine, one folder each.
const DEVICES: &str = "/proc/driver/nvidia/gpus";

impl MetricsSettings {
    /// Reads any source.
    #[must_use]
    pub fn new(source: &Source) -> Self {
        let seconds = |name| source.seconds(name).unwrap_or(Duration::from_secs(10));
        let levels = (source.levels("XPU_TIMER_COMM_BUCKETING_COUNT"), source.levels("XPU_TIMER_MM_BUCKETING_COUNT"));
        let levels = source.flag("XPU_TIMER_BUCKETING_METRICS").then_some(levels);
        MetricsSettings {
            look: seconds("XPU_TIMER_LOCAL_UPDATE_INTERVAL"),
            publish: seconds("XPU_TIMER_PROMETHEUS_UPDATE_INTERVAL"),
            collective_window: seconds("XPU_TIMER_COLL_BVAR_WINDOW_SIZE"),
            matmul_window: seconds("XPU_TIMER_MM_BVAR_WINDOW_SIZE"),
            silence: seconds("XPU_TIMER_DEREGISTER_TIME"),
            levels,
            device: source
                .text("XPU_TIMER_DEVICE_NAME")
                .or_else(|| first_device(Path::new(DEVICES)))
                .unwrap_or_default(),
        }
    }
}

/// The model of the machine's first device, found without calling a driver.
fn first_device(folder: &Path) -> Option<String> {
    let mut devices: Vec<_> = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).collect();
    devices.sort();
    let information = fs::read_to_string(devices.first()?.join("information")).ok()?;
    let model = information.lines().find_map(|line| line.strip_prefix("Model:"))?;
    Some(short_name(model))
}

/// `A100` for `NVIDIA A100-SXM4-80GB`, `P100` for `Tesla P100-PCIE-16GB`.
fn short_name(model: &str) -> String {
    let mut words = model.split_whitespace();
    let first = words.next().unwrap_or_default();
    words.next().unwrap_or(first).split('-').next().unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_are_escaped() {
        let mut page = Page::default();
        page.sample("m", &[("job_name", "a\"b\\c\nd".into()), ("rank", "3".into())], 1);
        page.sample("n", &[], 2.5);
        assert_eq!(page.text(), "m{job_name=\"a\\\"b\\\\c\\nd\",rank=\"3\"} 1\nn 2.5\n");
    }

    fn settings(pairs: &'static [(&str, &str)]) -> (MetricsSettings, usize) {
        let find = move |name: &str| pairs.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_string());
        let source = Source::new(find, "");
        (MetricsSettings::new(&source), source.problems().len())
    }

    #[test]
    fn the_defaults_are_those_of_the_original_tool() {
        let (settings, problems) = settings(&[]);
        let seconds =
            [settings.look, settings.publish, settings.collective_window, settings.matmul_window, settings.silence];
        assert_eq!(seconds.map(|time| time.as_secs()), [1, 10, 10, 10, 300]);
        assert_eq!((settings.levels, problems), (Some((20, 10)), 0));
    }

    #[test]
    fn the_environment_decides_and_levels_can_be_off() {
        let (settings, problems) = settings(&[
            ("XPU_TIMER_PROMETHEUS_UPDATE_INTERVAL", "0.5"),
            ("XPU_TIMER_COLL_BVAR_WINDOW_SIZE", "60"),
            ("XPU_TIMER_BUCKETING_METRICS", "0"),
            ("XPU_TIMER_DEREGISTER_TIME", "soon"),
            ("XPU_TIMER_DEVICE_NAME", "H100"),
        ]);
        assert_eq!((settings.publish.as_millis(), settings.collective_window.as_secs()), (500, 60));
        assert_eq!((settings.levels, settings.silence.as_secs(), problems), (None, 300, 1));
        assert_eq!(settings.device, "H100");
    }

    #[test]
    fn a_model_has_a_short_name() {
        for (model, name) in [
            ("NVIDIA A100-SXM4-80GB", "A100"),
            ("Tesla P100-PCIE-16GB", "P100"),
            (" \t NVIDIA H100 80GB HBM3", "H100"),
            ("Unknown", "Unknown"),
            ("", ""),
        ] {
            assert_eq!(short_name(model), name);
        }
        assert_eq!(first_device(Path::new("/nowhere")), None);
    }
}
