// Receives or messages that wait for their match, found by source and tag.
//
// A hash table whose entries carry their own links: adding, finding and removing take the same time however many
// entries there are, and allocate nothing. Entries with one key stay in the order in which they came.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace unisono {

template <class Entry>
class MatchTable {
 public:
  // The place of an entry under one key; a part of the entry.
  struct Link {
    Link *before = nullptr, *next = nullptr;
    uint64_t key = 0;
    Entry* entry = nullptr;  // nullptr: it is in no table
  };

  MatchTable() : buckets_(kFirstBuckets) {}
  bool empty() const { return size_ == 0; }

  // Adds an entry behind those with the same key. A wildcard is a number of its own.
  void append(Link& link, int source, int tag, Entry& entry) {
    if (size_ >= 2 * buckets_.size()) grow();
    link.key = key_of(source, tag);
    link.entry = &entry;
    append(buckets_, link);
    ++size_;
  }
  void remove(Link& link) {
    if (link.entry == nullptr) return;
    Bucket& bucket = bucket_of(buckets_, link.key);
    (link.before == nullptr ? bucket.first : link.before->next) = link.next;
    (link.next == nullptr ? bucket.last : link.next->before) = link.before;
    link = {};
    --size_;
  }
  // The first entry with this key, and the next one; nullptr: there is none.
  Link* first(int source, int tag) const {
    if (size_ == 0) return nullptr;
    const uint64_t key = key_of(source, tag);
    return with_key(bucket_of(buckets_, key).first, key);
  }
  Link* after(const Link& link) const { return with_key(link.next, link.key); }

 private:
  struct Bucket {
    Link *first = nullptr, *last = nullptr;
  };
  using Buckets = std::vector<Bucket>;
  static constexpr size_t kFirstBuckets = 64;

  static uint64_t key_of(int source, int tag) {
    return static_cast<uint64_t>(static_cast<uint32_t>(source)) << 32 | static_cast<uint32_t>(tag);
  }
  template <class Any>
  static auto& bucket_of(Any& buckets, uint64_t key) {
    return buckets[(key * 0x9e3779b97f4a7c15ULL >> 32) & (buckets.size() - 1)];
  }
  static Link* with_key(Link* link, uint64_t key) {
    while (link != nullptr && link->key != key) link = link->next;
    return link;
  }
  static void append(Buckets& buckets, Link& link) {
    Bucket& bucket = bucket_of(buckets, link.key);
    link.before = bucket.last;
    link.next = nullptr;
    (bucket.last == nullptr ? bucket.first : bucket.last->next) = &link;
    bucket.last = &link;
  }
  // Entries with one key are in one bucket before, too: their order stays.
  void grow() {
    try {
      Buckets larger(4 * buckets_.size());
      for (const Bucket& bucket : buckets_)
        for (Link *link = bucket.first, *next; link != nullptr; link = next) {
          next = link->next;
          append(larger, *link);
        }
      buckets_.swap(larger);
    } catch (const std::bad_alloc&) {  // only slower
    }
  }

  Buckets buckets_;  // a power of two
  size_t size_ = 0;
};

}  // namespace unisono
