! Four ranks in Fortran, through `use mpi` or, with -DF08, through the interface of Fortran 2008.
!
!     ranks FAULT
!
! Rank 2 stays away when FAULT is not none.
program ranks
#ifdef F08
  use mpi_f08
#else
  use mpi
#endif
  implicit none
#ifdef F08
  type(MPI_Request) :: request
  type(MPI_Comm) :: half
#else
  integer :: request, half
#endif
  integer :: ierr, rank, size, round, one, total
  character(len=32) :: fault
  call get_command_argument(1, fault)
  call MPI_Init(ierr)
  call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierr)
  call MPI_Comm_size(MPI_COMM_WORLD, size, ierr)
  do round = 1, 20
    one = 1
    call MPI_Allreduce(one, total, 1, MPI_INTEGER, MPI_SUM, MPI_COMM_WORLD, ierr)
    if (total /= size) call MPI_Abort(MPI_COMM_WORLD, 3, ierr)
    call MPI_Ibcast(total, 1, MPI_INTEGER, 0, MPI_COMM_WORLD, request, ierr)
    call MPI_Wait(request, MPI_STATUS_IGNORE, ierr)
    call MPI_Comm_split(MPI_COMM_WORLD, mod(rank, 2), rank, half, ierr)
    call MPI_Barrier(half, ierr)
    call MPI_Comm_free(half, ierr)
  end do
  if (rank == 2 .and. fault /= "none") then
    do
      call sleep(1)
    end do
  end if
  call MPI_Allreduce(one, total, 1, MPI_INTEGER, MPI_SUM, MPI_COMM_WORLD, ierr)
  call MPI_Finalize(ierr)
  print '(a,i0,a)', 'rank ', rank, ' done'
end program
