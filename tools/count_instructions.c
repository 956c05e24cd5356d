// Runs a program, steps its main thread through the stretches between two SIGUSR1 that it sends to itself,
// and prints the instructions of each stretch in a line. Other threads and processes run freely and are not
// counted.
#include <signal.h>
#include <stdio.h>
#include <sys/personality.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int count, char** words) {
  (void)count;
  personality(ADDR_NO_RANDOMIZE);
  const pid_t child = fork();
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, 0, 0) == 0) execvp(words[1], words + 1);
    _exit(127);
  }
  int status = 0, counting = 0;
  long instructions = 0;
  while (waitpid(child, &status, 0) == child && WIFSTOPPED(status)) {
    ptrace(PTRACE_SETOPTIONS, child, 0, PTRACE_O_EXITKILL);
    int passed_on = WSTOPSIG(status);
    if (passed_on == SIGUSR1) {
      if (counting) printf("%ld\n", instructions);
      counting = !counting;
      instructions = 0;
      passed_on = 0;
    } else if (passed_on == SIGTRAP) {
      instructions += counting;
      passed_on = 0;
    }
    if (ptrace(counting ? PTRACE_SINGLESTEP : PTRACE_CONT, child, 0, passed_on) != 0) return 126;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 126;
}
