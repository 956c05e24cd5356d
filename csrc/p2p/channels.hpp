// Point-to-point messages: one byte stream per ordered pair, messages with a header, matched by tag.
//
// Only two ranks take part in a message, and it may overlap any collective, so messages do not use the FIFOs.
// A waiting thread also receives messages for other requests: two ranks that both send first do not
// deadlock, whatever the size. Unexpected messages are kept in ordinary memory, up to kUnexpectedBytes for
// each sender; others wait there.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "p2p/match_table.hpp"
#include "p2p/receive_buffers.hpp"
#include "p2p/request.hpp"
#include "p2p/streams.hpp"
#include "protocol/frames.hpp"
#include "protocol/waiter.hpp"

namespace unisono {

// Unexpected messages are stored, up to this many bytes from each peer; kUnexpectedOverhead is added for
// each. Beyond it a message is offered: its header comes, and its bytes wait in their sender until a receive
// matches or there is room. So tags can be taken in any order. A rank that itself sends n bytes stores n
// more. So ranks that wait in a circle, each in a send, do not deadlock: the rank with the largest message
// stores the one that is sent to it.
constexpr uint64_t kUnexpectedBytes = 64 << 20;
constexpr uint64_t kUnexpectedOverhead = 256;
// A receiver that stores more than kFullBytes says so, and its sender offers all further messages, until
// there is room again. Messages of more than kOfferBytes are always offered.
constexpr uint64_t kFullBytes = kUnexpectedBytes / 2, kRoomBytes = kUnexpectedBytes / 4;
constexpr uint64_t kOfferBytes = kUnexpectedBytes / 2;

// What a header says about a message.
struct MessageEnvelope {
  int source, tag;
  uint32_t form;
  uint64_t nbytes;
};
inline MessageEnvelope envelope(int source, const MessageHeader& header) {
  return {source, plain_tag(header.tag), header.form(), header.nbytes};
}

// Whether a receive from `wanted_peer` with `wanted_tag` matches a message.
inline bool matches(int wanted_peer, int wanted_tag, int peer, int tag) {
  return (wanted_peer == kAnyRank || wanted_peer == peer) &&
         (wanted_tag == tag || wanted_tag == any_tag_like(tag));
}

// Counts a thread that waits.
class WaitingCaller {
 public:
  explicit WaitingCaller(std::atomic<int>& count) : count_(count) { count_.fetch_add(1); }
  WaitingCaller(const WaitingCaller&) = delete;
  WaitingCaller& operator=(const WaitingCaller&) = delete;
  ~WaitingCaller() { count_.fetch_sub(1); }

 private:
  std::atomic<int>& count_;
};

// A range of addresses; empty at first.
struct SentRange {
  uintptr_t low = UINTPTR_MAX, high = 0;
  void add(const unsigned char* data, uint64_t nbytes) {
    low = std::min(low, reinterpret_cast<uintptr_t>(data));
    high = std::max(high, reinterpret_cast<uintptr_t>(data) + nbytes);
  }
  bool overlaps(const unsigned char* data, uint64_t nbytes) const {
    return reinterpret_cast<uintptr_t>(data) < high && low < reinterpret_cast<uintptr_t>(data) + nbytes;
  }
};

// Allocating and copying so many bytes takes longer than another thread should wait for the GIL.
constexpr uint64_t kLarge = 64 * 1024;

class Channels {
 public:
  // sockets[rank]: connected, or -1; empty when all ranks are on one host. Takes them over.
  Channels(GroupState& group, const PeerProcesses& peers, int rank, WaitPolicy wait_policy,
           WaitPolicy background, FileDescriptors sockets, ControlPlane* control);
  ~Channels();
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;

  // The fast path of small messages: sends or receives a whole message at once, when no other message is
  // before it. False: it cannot, and nothing has changed. `spins`: how often to poll for a message.
  bool send_now(int peer, int tag, uint32_t form, const void* data, size_t nbytes);
  // `wanted`: form, tag and buffer of the receive; the size and tag of the message are written there.
  bool receive_now(Transfer& wanted, int spins);
  int spins() const { return wait_policy_.spins; }

  // Starts a request and moves small messages that can be moved now. Lets go of `caller_lock` before it waits
  // for another thread or copies much. False: its memory is in use (see ReceiveBuffers), and nothing has
  // changed.
  bool post(std::shared_ptr<Request> request, ReleasableLock& caller_lock);
  ReceiveBuffers& receive_buffers() { return receive_buffers_; }
  // Leaves the open requests to the background thread, for callers that do not wait at once.
  void detach(ReleasableLock& caller_lock);
  // Starts that thread. Throws a std::system_error where the system starts no more; nothing has changed then.
  void begin_thread(ReleasableLock& caller_lock);
  // Waits for a request. When `deadline` passes first: kTimeout, and the group is aborted if `fatal`.
  // `caller_lock` is released before a long wait.
  FaultKind wait(Request& request, Nanoseconds deadline, bool fatal, const std::function<bool()>* interrupt,
                 ReleasableLock& caller_lock);
  // The caller knows that a request is done: its memory may be used again.
  void see(Request& request);
  // Cancels a receive that no message has matched; false: one has, it has ended, or it is a send.
  bool cancel(Request& request);
  // The message that a receive from `peer` with `tag` would get now, if one has arrived. A peer that is lost,
  // or has left without sending one, is the same fault as in a receive.
  FaultKind probe_now(int peer, int tag, std::optional<MessageEnvelope>& found);
  // Waits for such a message. kTimeout: none arrived; the group continues.
  FaultKind probe(int peer, int tag, Nanoseconds deadline, const std::function<bool()>* interrupt,
                  std::optional<MessageEnvelope>& found);
  // The same where that needs no wait and no step of the other messages; false: look with `probe_now`.
  bool peek_now(int peer, int tag, int spins, std::optional<MessageEnvelope>& found);
  // Moves all messages that can be moved now.
  FaultKind advance();
  // Requests that are not done.
  size_t open_requests();
  // Whole unexpected messages, in order.
  std::vector<MessageEnvelope> unexpected();
  // Ends all requests and the thread. `forked`: this is a forked child's copy; thread and lock are the
  // parent's.
  void leave(bool forked);
  bool finished(int peer) const { return streams_.finished(peer); }
  // The same, but the connections stay open: they are the caller's.
  FileDescriptors hand_over();
  bool has_open_transfers() const { return has_open_transfers_; }  // see Executor
  void close_copies() { streams_.close_copies(); }                 // see ControlPlane
  bool raw = false;  // all receives are raw, see Request; set it before the first message

 private:
  using Header = MessageHeader;
  // A message that no receive matched when it arrived, or an offer. It is kept until one does.
  struct UnexpectedMessage {
    int peer;
    Header header;
    std::unique_ptr<unsigned char[]> bytes;
    bool whole = false;                  // all bytes have arrived
    uint64_t number = 0;                 // of its offer
    bool asked = false;                  // the offer was granted
    bool counted = false;                // in unexpected_bytes_
    bool synchronous = false;            // an offer for which room is no reason to ask
    std::shared_ptr<Request> sender{};   // of a synchronous message to this rank itself
    std::shared_ptr<Request> request{};  // the receive that gets it
    // Until one does: its places under the four pairs of source and tag that a receive of it can have.
    std::array<MatchTable<UnexpectedMessage>::ChainLink, 4> links{};
    std::list<UnexpectedMessage>::iterator place{};
    bool stored() const { return bytes != nullptr; }
    bool waits() const { return number != 0 && !asked; }  // in its sender
  };
  using Unexpected = std::list<UnexpectedMessage>;
  // The message that is arriving from one peer: into a receive's buffer, or into an UnexpectedMessage.
  struct IncomingMessage {
    bool arriving = false;
    bool unmatched = false;  // it has no place yet
    Header header{};
    size_t header_moved = 0;
    uint64_t moved = 0;
    std::shared_ptr<Request> request;
    Unexpected::iterator message;
  };
  // The offers between this rank and one peer, see offers.cpp.
  struct Offers {
    uint64_t made = 0, received = 0;
    std::map<uint64_t, std::shared_ptr<Request>> offered;  // sends that the peer has not asked for
    std::map<uint64_t, Unexpected::iterator> asked;        // messages that this rank has asked for
    bool peer_is_full = false, told_full = false;
    uint64_t sent_at_once = 0;  // since this rank last looked for what the peer says
  };

  using MessageLink = MatchTable<UnexpectedMessage>::ChainLink;

  bool is_running() const { return !stopping_ && !failed_ && !group_.aborted(); }
  void enqueue(std::shared_ptr<Request> request);  // from here on: with mutex_ held
  // When large messages are copied, and kept where no receive matches them.
  enum class LargeMessages { kNow, kLater };
  void progress(LargeMessages large = LargeMessages::kNow);
  void push(int peer, LargeMessages large);
  void pull(int peer, LargeMessages large);
  std::unique_lock<std::mutex> locked(ReleasableLock& caller_lock);
  Channel& channel(int sender, int receiver);
  void check_memory(const Request& request);
  void begin_zero_copy(Request& request);
  bool progress_zero_copy(Request& request);
  bool fetch_zero_copy(int peer, unsigned char* target);
  void cancel_zero_copy(int peer);
  bool read_header(int peer);
  bool take_frame(int peer);
  void accept_message(int peer);
  void store(int peer, const Header& header, UnexpectedMessage& message);
  template <class Make>
  void allocate(int peer, const Header& header, Make make);
  bool can_store(int peer, uint64_t nbytes) const;
  void refuse_frame(int peer, const FrameError& bad);
  Unexpected::iterator add_unexpected(int peer, const Header& header, std::unique_ptr<unsigned char[]> bytes);
  void take_unexpected(UnexpectedMessage& message);
  void erase_unexpected(Unexpected::iterator message);
  bool receive_kept(Transfer& wanted);
  bool receive_front(int peer, Transfer& wanted);
  bool front_is_next(int peer);
  int arrived_from(int peer);
  Offers& offers(int peer) { return offers_[static_cast<size_t>(peer)]; }
  bool must_offer(int peer, const Request& request) {
    return offers(peer).peer_is_full || request.synchronous || request.nbytes > kOfferBytes;
  }
  void place_offer(int peer, const Header& header);
  bool grant_to(const std::shared_ptr<Request>& request, Unexpected::iterator message);
  void grant(Unexpected::iterator message);
  void store_offers();
  bool send_granted(int peer, uint64_t number);
  bool receive_granted(int peer, uint64_t number);
  void tell(int peer, MessageFrame frame, uint64_t number = 0);
  bool write_header(int peer, Request& request);
  template <class Visit>
  void each_send(Visit visit) const;
  void finish_incoming(int peer);
  using Receives = std::list<std::shared_ptr<Request>>;
  Request* first_match(int peer, int tag) const;
  std::shared_ptr<Request> take_match(int peer, const Header& header);
  std::shared_ptr<Request> take_receive(Request& receive);
  bool held(const Request& receive) const;
  void hold_back(Request& receive);
  bool is_sent_from(const unsigned char* data, uint64_t nbytes) const;
  void deliver_held();
  bool deliver_unexpected(Request& receive);
  template <class Wait>
  FaultKind probing(Waiter& waiting, Wait wait);
  std::optional<MessageEnvelope> progress_to(int peer, int tag);
  std::optional<MessageEnvelope> first_unexpected(int peer, int tag) const;
  void deliver(Request& request, int peer, const Header& header, const unsigned char* bytes);
  void deliver(Request& request, UnexpectedMessage& message);
  void send_to_self(const std::shared_ptr<Request>& send);
  void refuse(Request& request, int peer, const Header& header);
  void finish(Request& request, FaultKind fault);
  void fail_all(FaultKind fault);
  FaultKind out_of_memory(Waiter& waiter);
  bool idle() const { return unfinished_requests_ == 0; }
  void wake_others(uint64_t ended, int waiting_here);
  bool callers_are_away(std::unique_lock<std::mutex>& lock);
  void serve_while_away(Waiter& waiting);
  void begin_wait(Waiter& waiter, int& awaited);

  Waiter waiter(WaitPolicy wait_policy);
  void stop(FileDescriptors* taken);
  void serve();

  GroupState& group_;
  const PeerProcesses& peers_;
  const int rank_;
  const WaitPolicy wait_policy_, background_wait_policy_;
  std::mutex mutex_;
  std::vector<std::deque<std::shared_ptr<Request>>> sends_;  // per receiver, in order
  size_t open_sends_ = 0;                                    // sends that are not done
  SentRange sent_from_;                                      // contains their memory
  Receives receives_;                                        // not yet matched, in order
  MatchTable<Request> posted_;                               // these, by source and tag
  uint64_t receives_posted_ = 0;                             // ever
  size_t held_ = 0;                                          // of these, those with `readers`
  bool released_ = false;                                    // one was cancelled: others get what it would
  ReceiveBuffers receive_buffers_;
  std::vector<IncomingMessage> incoming_;
  std::vector<uint64_t> zero_copy_sends_;  // messages sent with zero copy to each rank
  Unexpected unexpected_;
  MatchTable<UnexpectedMessage> kept_;       // of them, those that no receive gets
  std::atomic<bool> has_unexpected_{false};  // for callers without the lock
  std::atomic<int> first_looked_at_{0};      // of the ranks of this host, by a receive from any
  size_t waiting_offers_ = 0;                // of them, those that wait in their sender
  std::vector<Offers> offers_;               // by peer
  bool may_store_ = false;                   // there may be room for an offer
  bool has_answers_ = false;                 // what has arrived made something to send
  std::vector<uint64_t> unexpected_bytes_;   // by peer
  SocketStreams streams_;
  ControlPlane* const control_;
  size_t unfinished_requests_ = 0;                          // requests that are not done
  uint64_t caller_epoch_ = 0, ended_ = 0;                   // requests that callers posted; that ended
  std::atomic<int> waiting_callers_{0};                     // threads in `wait` or `probe`
  Nanoseconds next_deadline_ = INT64_MAX;                   // no open request has an earlier one
  bool asleep_ = false;                                     // the thread waits to be notified
  Fault memory_fault_{FaultKind::kNoMemory, rank_, rank_};  // `rank`: whose message cannot be kept
  bool failed_ = false;  // after a fault: the messages in the rings can no longer be separated
  std::atomic<bool> has_open_transfers_{false};
  bool stopping_ = false;
  bool forked_ = false;  // by a fork
  std::condition_variable request_posted_;
  std::thread thread_;
  std::atomic<bool> has_thread_{false};
};

// The sends that are not done, those that the peers have not asked for among them.
template <class Visit>
void Channels::each_send(Visit visit) const {
  for (const auto& queue : sends_)
    for (const auto& request : queue) visit(request);
  for (const Offers& one : offers_)
    for (const auto& [number, request] : one.offered) visit(request);
}

}  // namespace unisono
