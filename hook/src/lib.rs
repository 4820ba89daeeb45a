//! `libxpu_timer_hook.so`, preloaded into the training process: records launches and collectives, signals a hang.
//!
//! Architecture Invariant: nothing here can make a hooked call fail, wait, or return something else than the original; a process that
//! makes no device call gets no thread, no socket and no memory. The way in is [`hooked`]; the data goes to [`recorder`];
//! [`watcher`] does the rest on a thread of its own. A hooked function is a row in [`nccl`], [`driver`] or [`runtime`].
#![deny(unsafe_code)]

mod abi;
#[allow(unsafe_code)]
mod atomic;
#[allow(unsafe_code)]
mod bell;
#[allow(unsafe_code)]
mod blas;
mod bracket;
#[allow(unsafe_code)]
mod cancellation;
mod comms;
#[allow(unsafe_code)]
mod config;
mod cost;
mod counter;
#[allow(unsafe_code)]
mod device;
#[allow(unsafe_code)]
mod driver;
mod family;
#[allow(unsafe_code)]
mod filters;
#[allow(unsafe_code)]
mod graphs;
mod handoff;
mod hooked;
#[allow(unsafe_code)]
mod host;
mod inject;
#[allow(unsafe_code)]
mod inline;
mod lanes;
mod launch;
#[allow(unsafe_code)]
mod lookup;
#[allow(unsafe_code)]
mod memory;
#[allow(unsafe_code)]
mod nccl;
#[allow(unsafe_code)]
mod one_layer;
#[allow(unsafe_code)]
mod original;
mod pace;
mod place;
mod pools;
#[allow(unsafe_code)]
mod queue;
mod recorder;
#[allow(unsafe_code)]
mod ring;
#[allow(unsafe_code)]
mod runtime;
mod slot;
#[allow(unsafe_code)]
mod start;
#[allow(unsafe_code)]
mod surroundings;
#[allow(unsafe_code)]
mod sys;
#[allow(unsafe_code)]
mod thread_state;
#[allow(unsafe_code)]
mod tracer;
#[allow(unsafe_code)]
mod watcher;

/// Every hooked function; the order is that of the coverage table.
fn functions() -> impl Iterator<Item = &'static original::Function> {
    let tables = [
        nccl::FUNCTIONS,
        nccl::later::FUNCTIONS,
        nccl::kin::FUNCTIONS,
        driver::FUNCTIONS,
        driver::get_proc_address::FUNCTIONS,
        runtime::FUNCTIONS,
        one_layer::FUNCTIONS,
        memory::FUNCTIONS,
        memory::driver::FUNCTIONS,
        blas::FUNCTIONS,
    ];
    tables.into_iter().chain(host::TABLES).flatten().copied()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use xpu_timer_proto::ring::coverage;

    #[test]
    fn every_function_is_one_row_and_has_its_place_in_the_coverage_table() {
        let names: Vec<_> = crate::functions().map(|function| function.name).collect();
        assert!(names.len() <= coverage::SLOTS, "{}", names.len());
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
    }
}
