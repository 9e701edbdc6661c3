// SPDX-License-Identifier: Apache-2.0
// An MPI program whose last rank ends in the way that its argument names.
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, size, sum = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  printf("rank %d counts %d\n", rank, sum);
  fflush(stdout);
  const char* end = argc > 1 ? argv[1] : "well";
  if (strcmp(end, "checkpoint") == 0) {
    MPI_Finalize();
    return 75;
  }
  if (rank == size - 1) {
    if (strcmp(end, "abort") == 0) MPI_Abort(MPI_COMM_WORLD, 42);
    if (strcmp(end, "kill") == 0) raise(SIGKILL);
    if (strcmp(end, "exit") == 0) exit(5);
    if (strcmp(end, "leave") == 0) _exit(0);  // without MPI_Finalize: its peers would wait forever
  }
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Finalize();
  return 0;
}
