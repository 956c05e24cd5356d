// What /proc says of a process.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "protocol/descriptor.hpp"

namespace unisono {

// Reads the beginning of a file of /proc; "" when it is not there.
template <size_t kBytes>
const char* read_proc(const char* path, char (&text)[kBytes]) {
  const FileDescriptor file(open(path, O_RDONLY | O_CLOEXEC));
  const ssize_t got = file < 0 ? -1 : read(file, text, kBytes - 1);
  text[std::max<ssize_t>(got, 0)] = '\0';
  return text;
}

// Behind the name in /proc/PID/stat, which may contain anything; nullptr: there is no such process.
template <size_t kBytes>
const char* state_of(int pid, char (&text)[kBytes]) {
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  return std::strrchr(read_proc(path, text), ')');
}

// Whether SIGKILL is on its way. Short of memory, the system takes that of a process before it has ended.
inline bool is_killed(int pid) {
  constexpr int kName = 2, kPending = 31;  // fields of /proc/PID/stat
  char text[1024];
  const char* at = state_of(pid, text);
  for (int field = kName; at != nullptr && field < kPending; ++field) at = std::strchr(at + 1, ' ');
  return at != nullptr && (std::strtoull(at, nullptr, 10) >> (SIGKILL - 1) & 1) != 0;
}

}  // namespace unisono
