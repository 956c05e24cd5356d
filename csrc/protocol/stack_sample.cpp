#include "protocol/stack_sample.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <new>

namespace unisono {
namespace {

constexpr size_t kStackBytes = 64 * 1024;  // faulthandler writes at most 100 frames
constexpr Nanoseconds kLocatePatience = 200 * kMillisecond;
constexpr useconds_t kLookUs = 500;
constexpr size_t kMostLocated = 8;
constexpr std::string_view kFileName = "/memfd:unisono-stack";  // see engine/bootstrap/stack_file.py

// The question to a thread of one rank of this host.
class StackQuestion {
 public:
  // publishes: this thread has claimed the rank's report, which will be the answer.
  StackQuestion(GroupState& group, const PeerProcesses& peers, int rank, pid_t thread, bool publishes)
      : cell_(group.cell(rank)),
        pid_(cell_.pid.load(std::memory_order_relaxed)),
        thread_(thread),
        publishes_(publishes) {
    const bool alive = pid_ == getpid() || (peers.pidfd(rank) >= 0 && !peers.dead(rank));
    const int fd = cell_.stack_fd.load(std::memory_order_relaxed) - 1;
    const std::string path = "/proc/" + std::to_string(pid_) + "/fd/" + std::to_string(fd);
    char name[kFileName.size()];
    // The program may have closed its descriptors and used the number again: then nobody may write there.
    if (alive && fd >= 0 && readlink(path.c_str(), name, sizeof name) == ssize_t{sizeof name} &&
        std::string_view(name, sizeof name) == kFileName)
      file_ = FileDescriptor(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (file_ < 0) end("");
  }

  // Sends the signal once nobody else asks this process, and looks for the stack.
  void advance() {
    if (start_ < 0 && flock(file_, LOCK_EX | LOCK_NB) == 0) {
      start_ = lseek(file_, 0, SEEK_END);
      if (syscall(SYS_tgkill, pid_, thread_, SIGURG) != 0)  // it has ended: ask the main thread
        (void)syscall(SYS_tgkill, pid_, pid_, SIGURG);
    }
    const std::string line = found(false);
    if (!line.empty()) end(line);
  }

  // The time is over. The whole program may be an installed package; or the line stays unknown, and nobody
  // waits for it again.
  void finish() { end(found(true)); }
  bool is_open() const { return file_ >= 0; }
  const std::string& line() const { return line_; }

 private:
  std::string found(bool installed) const {
    if (start_ < 0) return "";
    std::string stack(kStackBytes, '\0');
    stack.resize(static_cast<size_t>(std::max<ssize_t>(0, pread(file_, stack.data(), stack.size(), start_))));
    return program_line(stack, stack_file().library_folders, installed);
  }
  void end(const std::string& line) {
    line_ = line.size() < kReportBytes ? line : "..." + line.substr(line.size() + 4 - kReportBytes);
    if (publishes_) publish_report(cell_, kLocated, line_);
    file_.reset();
  }

  RankCell& cell_;
  const pid_t pid_, thread_;
  const bool publishes_;
  std::string line_;
  FileDescriptor file_;
  off_t start_ = -1;  // of the stack in the file; -1: not asked yet
};

bool is_installed(std::string_view file) {
  return file.find("/site-packages/") != file.npos || file.find("/dist-packages/") != file.npos;
}

bool is_library(std::string_view file, const std::vector<std::string>& folders) {
  if (file.starts_with("<frozen ")) return true;
  return std::ranges::any_of(folders, [&](const std::string& folder) {
    // The folder of Python's own library may have that of installed packages in it.
    return file.starts_with(folder) && !is_installed(file.substr(folder.size() - 1));
  });
}

}  // namespace

StackFile& stack_file() {
  static StackFile file;
  return file;
}

std::string program_line(std::string_view stack, const std::vector<std::string>& library_folders,
                         bool installed) {
  constexpr std::string_view kFile = "  File \"", kLine = "\", line ";
  for (size_t end; (end = stack.find('\n')) != stack.npos; stack.remove_prefix(end + 1)) {
    const std::string_view frame = stack.substr(0, end);
    const size_t quote = frame.rfind(kLine);
    if (!frame.starts_with(kFile) || quote == frame.npos || quote < kFile.size()) continue;
    const std::string_view file = frame.substr(kFile.size(), quote - kFile.size());
    if (is_library(file, library_folders) || (!installed && is_installed(file))) continue;
    return std::string(file) + ":" + std::string(frame.substr(quote + kLine.size()));
  }
  return "";
}

std::vector<int> late_ranks(GroupState& group) {
  const Fault fault = group.fault();
  std::vector<int> late;
  if (fault.kind != FaultKind::kTimeout) return late;
  for (int rank = 0; rank < group.ranks() && late.size() < kMostLocated; ++rank)
    if (group.cell(rank).started.load(std::memory_order_acquire) < fault.seq) late.push_back(rank);
  if (late.empty() && fault.rank >= 0 && fault.rank != fault.found_by) late.push_back(fault.rank);
  return late;
}

void locate_late_ranks(GroupState& group, const PeerProcesses& peers) try {
  const Nanoseconds end = now_ns() + kLocatePatience;
  const std::vector<int> ranks = late_ranks(group);
  std::vector<StackQuestion> questions;
  for (const int rank : ranks) {
    RankCell& cell = group.cell(rank);
    if (!group.on_this_host(rank) || !claim_report(cell)) continue;
    questions.emplace_back(group, peers, rank, cell.thread.load(std::memory_order_relaxed), true);
  }
  const auto unknown = [&](int rank) {
    return group.cell(rank).report.state.load(std::memory_order_acquire) != 2;
  };
  for (; std::ranges::any_of(ranks, unknown) && now_ns() < end; usleep(kLookUs))
    for (StackQuestion& each : questions)
      if (each.is_open()) each.advance();
  for (StackQuestion& each : questions)
    if (each.is_open()) each.finish();
} catch (const std::bad_alloc&) {  // the lines stay unknown
}

std::string locate(GroupState& group, const PeerProcesses& peers, int rank, pid_t thread) {
  if (!group.on_this_host(rank)) return "";
  StackQuestion question(group, peers, rank, thread, false);
  for (const Nanoseconds end = now_ns() + kLocatePatience; question.is_open() && now_ns() < end;
       usleep(kLookUs))
    question.advance();
  if (question.is_open()) question.finish();
  return question.line();
}

}  // namespace unisono
