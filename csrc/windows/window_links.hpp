// The connections of a window to ranks whose memory this process cannot reach: two for each, so that the
// calls of one rank never meet the replies of the other. A thread for each such rank sleeps on the one
// through which that rank asks. It may wait for a lock there: a rank that waits for a lock makes no other
// call to its target.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "protocol/control.hpp"
#include "protocol/frames.hpp"
#include "protocol/waiter.hpp"

namespace unisono {

class Window;

// How long a call may take, and what its thread holds.
struct WindowLimits {
  Nanoseconds timeout;
  ReleasableLock* caller_lock;
};

class WindowLinks final : public SocketPoller {
 public:
  WindowLinks(const WaitContext& context, Window& window);
  ~WindowLinks() override;

  // Takes over the connections, by rank (-1: none), and starts the threads.
  void connect(FileDescriptors asking, FileDescriptors serving);

  // Sends a request and its bytes; `into`: where the bytes of the reply go. replies: waits for the reply.
  // Otherwise `flush` does.
  WindowReply ask(int peer, const WindowRequest& request, std::span<const unsigned char> bytes,
                  std::span<unsigned char> into, bool replies, const WindowLimits& limits);
  void flush(int peer, const WindowLimits& limits);
  void end();
  void close_copies();

  // ---- in the thread that serves `peer`; false: the connection has ended
  bool read(int peer, void* into, size_t nbytes);
  bool write(int peer, const void* from, size_t nbytes);
  bool skip(int peer, size_t nbytes);
  std::vector<unsigned char>& scratch(int peer) { return at(peer).scratch; }

  // ---- of a Waiter that waits for signals of a rank: the thread that serves it receives them
  void flush() override {}
  bool busy() const override { return false; }
  uint32_t epoch() const override;
  void sleep(int awaited, Nanoseconds slice, uint32_t epoch) override;
  bool ended(int peer) const override { return links_[static_cast<size_t>(peer)]->ended.load(); }

 private:
  struct WindowLink {
    int peer;
    FileDescriptor asking, serving;
    std::mutex turn;  // held by the thread that asks
    std::atomic<std::thread::id> asker{};
    size_t unanswered = 0;  // requests whose replies have not been read; guarded by `turn`
    std::vector<unsigned char> scratch;
    std::atomic<bool> ended{false};
    std::thread thread;
  };
  class Turn;
  class Patience;
  WindowLink& at(int peer) { return *links_[static_cast<size_t>(peer)]; }
  void send(WindowLink& link, Patience& patience, const WindowRequest& request,
            std::span<const unsigned char> bytes);
  void receive(WindowLink& link, Patience& patience, void* into, size_t nbytes);
  WindowReply read_reply(WindowLink& link, Patience& patience);
  void settle(WindowLink& link, Patience& patience, size_t left);
  void serve(int peer);

  const WaitContext context_;
  Window& window_;
  const pid_t owner_;
  std::atomic<bool> ending_{false};
  std::mutex end_lock_;                             // of the end of the threads
  std::vector<std::unique_ptr<WindowLink>> links_;  // by rank; nullptr: none is needed
};

}  // namespace unisono
