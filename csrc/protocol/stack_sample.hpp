// At which line of its program a late rank is. Python's faulthandler writes the stack of a thread that gets
// SIGURG into a memory file of its process; the rank that waits sends the signal and reads the file. The
// thread may compute, sleep or be in C code: nothing here takes the GIL. Only after a wait that was too long.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "protocol/waiter.hpp"

namespace unisono {

// The memory file of this process; -1: it has none.
struct StackFile {
  int fd = -1;
  std::vector<std::string> library_folders;  // whose lines are not the program's
};
StackFile& stack_file();

// The innermost line of the program in a stack as faulthandler writes it: "train.py:42 in load_batch"; "":
// none. installed: lines of installed packages count, except those of the library folders.
std::string program_line(std::string_view stack, const std::vector<std::string>& library_folders,
                         bool installed);

// After a timeout: the first of the ranks that were waited for in vain.
std::vector<int> late_ranks(GroupState& group);

// After a timeout: waits at most 0.2 s until each of `late_ranks` has a report of its line. Asks those of
// this host that nobody else asks; their report is "" if the line stays unknown.
void locate_late_ranks(GroupState& group, const PeerProcesses& peers);

// The line of one thread of a rank of this host; "": unknown. Waits at most 0.2 s, and fails nothing.
std::string locate(GroupState& group, const PeerProcesses& peers, int rank, pid_t thread);

}  // namespace unisono
