//! Compares a library with the hook: its hooked functions, and those that are not hooked although
//! their names suggest that they matter.
//!
//! This is for users with a newer library than the hook knows. A name alone proves little, so the
//! second list contains candidates.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde_json::{Value, json};
use xpu_timer_proto::printable::line;

use super::loaded;
use crate::{config::Config, preload};

/// Prefixes of the names of libraries that the hook knows.
const LIBRARIES: [&str; 13] =
    ["nccl", "mccl", "Hccl", "cncl", "cu", "__cuda", "hip", "mc", "MPI_", "MPIX_", "musa", "mu", "msccl"];
/// Parts of names of functions that launch, communicate or multiply. Lower case, as the names are
/// compared.
const MATTERS: [&str; 21] = [
    "launch",
    "allreduce",
    "allgather",
    "reducescatter",
    "reduce_scatter",
    "broadcast",
    "bcast",
    "alltoall",
    "send",
    "recv",
    "gather",
    "scatter",
    "barrier",
    "signal",
    "comminit",
    "commsplit",
    "commgrow",
    "commshrink",
    "groupend",
    "gemm",
    "matmul",
];
/// Parts of names of functions that only query, configure or report.
const HARMLESS: [&str; 9] =
    ["get", "set", "attribute", "heuristic", "algo", "destroy", "hostfunc", "requirement", "node"];

/// The result.
#[derive(Debug, PartialEq, Eq)]
pub struct Compared {
    file: PathBuf,
    hooked: Vec<String>,
    not_hooked: Vec<String>,
}

impl Compared {
    /// Compares the functions that a library exports with those of the hook that the launcher would
    /// use.
    ///
    /// # Errors
    /// One of them cannot be read.
    pub fn with_hook(file: &Path) -> Result<Self> {
        let hook = loaded::exported_functions(&preload::find(&Config::read())?)?;
        if !file.exists() {
            bail!(
                "there is no file {}: --library takes the path of a library and searches no other folder",
                file.display()
            );
        }
        let own = loaded::exported_functions(file)?;
        let hooked = own.intersection(&hook).cloned().collect();
        // Functions have second names for profilers, which are aliases.
        let second = |name: &str| {
            ["p", "P"].iter().any(|prefix| name.strip_prefix(prefix).is_some_and(|name| own.contains(name)))
        };
        let not_hooked =
            own.difference(&hook).filter(|name| may_be_missing_hook(name) && !second(name)).cloned().collect();
        Ok(Compared { file: file.to_path_buf(), hooked, not_hooked })
    }

    /// As JSON.
    pub fn json(&self) -> Value {
        json!({ "library": self.file, "hooked": self.hooked, "not_hooked": self.not_hooked })
    }

    /// As text.
    pub fn text(&self) -> String {
        let mut text = format!("{}: {} functions are hooked\n", line(&self.file.to_string_lossy()), self.hooked.len());
        let mut list = |title: &str, names: &[String]| {
            text.push_str(&format!("\n{title}\n"));
            for name in names {
                text.push_str(&format!("  {}\n", line(name)));
            }
            if names.is_empty() {
                text.push_str("  none\n");
            }
        };
        list("Hooked", &self.hooked);
        list("Not hooked, but named like a launch, a collective or a matrix product", &self.not_hooked);
        text
    }
}

/// Whether the name suggests a function that launches, communicates or multiplies.
fn may_be_missing_hook(name: &str) -> bool {
    let lower = name.to_lowercase();
    LIBRARIES.iter().any(|prefix| name.starts_with(prefix))
        && MATTERS.iter().any(|part| lower.contains(part))
        && !HARMLESS.iter().any(|part| lower.contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_whether_a_function_matters() {
        for name in
            ["ncclAllReduceLater", "cuLaunchKernelEx2", "cublasCgemm_v2", "hipGraphLaunchLater", "MPI_Isendrecv"]
        {
            assert!(may_be_missing_hook(name), "{name}");
        }
        for name in ["ncclCommCount", "cudaLaunchHostFunc", "cublasLtMatmulAlgoGetHeuristic", "sendto", "cuMemcpyAsync"]
        {
            assert!(!may_be_missing_hook(name), "{name}");
        }
    }
}
