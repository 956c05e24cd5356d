// Point-to-point messages: one byte stream per ordered pair, messages with a header, matched by tag.
//
// They are known to two ranks only and may overlap any collective, so they use nothing of the lanes.
// Whoever waits here also takes in what has arrived for others' sake: two ranks that both send first,
// whatever the size, do not deadlock; a message nobody has asked for yet is kept in ordinary memory.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

#include "dtype.hpp"
#include "streams.hpp"
#include "waiting.hpp"

namespace unisono {

constexpr int kAnyRank = -1;
constexpr int kAnyTag = -1;

// A send or a receive on its way. `done` once set, the caller's memory is the caller's again.
struct Request {
  bool sending;
  int peer;  // receive: kAnyRank until matched
  int tag;
  DType dtype;
  unsigned char* data;
  uint64_t nbytes;
  Nanoseconds deadline = INT64_MAX;
  uint64_t moved = 0;  // bytes, the header not counted
  size_t header_moved = 0;
  bool lent = false;  // its bytes go from memory to memory, not through the stream
  std::atomic<FaultKind> fault{FaultKind::kNone};
  std::atomic<bool> done{false};
};

class Channels {
 public:
  // sockets[rank]: connected, or -1; empty when all ranks are on one host. Takes them over.
  Channels(World& world, const Peers& peers, int rank, Patience patience, Patience background,
           std::vector<int> sockets, Control* control);
  ~Channels();
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;

  // A small message that goes, or has come, whole and at once, with nothing before it: the usual one. False:
  // it does not, and nothing has happened. `spins`: how often to look for one to receive.
  bool send_now(int peer, int tag, DType dtype, const void* data, size_t nbytes);
  bool receive_now(int peer, int tag, DType dtype, void* data, size_t nbytes, int spins);
  int spins() const { return patience_.spins; }

  // Starts a request and moves what can be moved now.
  void post(std::shared_ptr<Request> request);
  // Leaves a request to the background thread, for callers that will not wait at once.
  void detach();
  // Waits for a request. When `deadline` passes first: kTimeout, and the group is aborted if `fatal`.
  FaultKind wait(Request& request, Nanoseconds deadline, bool fatal, const std::function<bool()>* interrupt);
  // (source, tag, dtype, bytes) of whole messages that nobody here has asked for, in order.
  std::vector<std::tuple<int, int, uint32_t, uint64_t>> unexpected();
  // Ends everything. `forked`: this is a fork's copy, whose thread and lock are the parent's.
  void leave(bool forked);
  bool unsettled() const { return unsettled_; }     // see Executor
  void close_copies() { streams_.close_copies(); }  // see Control

 private:
  struct Header {
    uint64_t nbytes;
    int32_t tag;
    uint32_t dtype;
  };
  // A message that is arriving from one peer: into its receiver's memory, or kept until one asks.
  struct Kept {
    int peer;
    Header header;
    std::vector<unsigned char> bytes;
    bool whole;  // all of it has come
  };
  struct Incoming {
    bool open = false;
    Header header{};
    size_t header_moved = 0;
    uint64_t moved = 0;
    bool lent = false;
    std::shared_ptr<Request> request;
    std::list<Kept>::iterator kept;
  };

  bool works() const {
    return !stopping_ && !failed_ && world_.abort().state.load(std::memory_order_acquire) == 0;
  }
  void enqueue(std::shared_ptr<Request> request);  // this one and those below: with mutex_ held
  void progress();
  void push(int peer);
  void pull(int peer);
  Channel& channel(int sender, int receiver);
  void offer(Request& request);
  bool lend(Request& request);
  bool borrow(int peer, unsigned char* target);
  void give_up(int peer);
  bool read_header(int peer);
  void finish_incoming(int peer);
  std::shared_ptr<Request> match(int peer, const Header& header);
  bool take_kept(Request& request);
  void deliver(Request& request, int peer, const Header& header, const unsigned char* bytes);
  void loop_back(Request& send);
  void refuse(Request& request, int peer, const Header& header);
  void finish(Request& request, FaultKind fault);
  void fail_all(FaultKind fault);
  FaultKind out_of_memory(Waiter& waiter);
  bool idle() const { return open_ == 0; }
  void begin_wait(Waiter& waiter, int& awaited);

  Waiter waiter(Patience patience);
  void serve();

  World& world_;
  const Peers& peers_;
  const int rank_;
  const Patience patience_, background_;
  std::mutex mutex_;
  std::vector<std::deque<std::shared_ptr<Request>>> sends_;  // per receiver, in order
  std::deque<std::shared_ptr<Request>> receives_;            // not yet matched, in order
  std::vector<Incoming> incoming_;
  std::vector<uint64_t> lent_;  // messages lent to each rank
  std::list<Kept> kept_;
  Streams streams_;
  Control* const control_;
  size_t open_ = 0;       // requests not done
  uint64_t changes_ = 0;  // requests posted or ended
  bool failed_ = false;   // after a fault: what is in the rings can no longer be told apart
  std::atomic<bool> unsettled_{false};
  bool stopping_ = false;
  bool abandoned_ = false;  // by a fork
  std::condition_variable work_came_;
  std::thread thread_;
};

}  // namespace unisono
