// A batch of messages between random ranks, posted by each rank in an order of its own. It lives until all have ended,
// however they end.
#pragma once
#include <map>

#include "calls.h"

class Batch {
 public:
  Batch(Group& group, uint64_t key) : group_(group), key_(key) {}
  Batch(const Batch&) = delete;
  ~Batch() {
    for (const auto& work : works_) try {
        work->wait(std::nullopt, nullptr);
      } catch (const CommError&) {
      }
  }

  void post(Team& team) {
    Random plan(key_), own(key_of(key_, group_.rank() + 1));
    const int world = group_.world();
    const MessageHeader any{random_count(plan), DType::uint8, static_cast<uint32_t>(key_) | 4};  // no other batch's tag
    std::vector<Message> messages(2 + plan.below(4 * world));
    std::vector<std::pair<uint32_t, bool>> turns;  // tag, whether to send
    for (Message& message : messages) {
      message.from = static_cast<int>(plan.below(world));
      message.to = static_cast<int>(plan.below(world));
      // Any rank is any other one. Such a receive waits as long as one of them lives.
      message.from_any = message.from != message.to && plan.one_in(3) && (world == 2 || !team.loses_a_rank);
      const auto dtype = static_cast<DType>(plan.below(dtype_count));
      message.header = {random_count(plan), dtype, static_cast<uint32_t>(plan.below(4))};
      if (message.from_any) message.header = any;
      team.messages += message.from == group_.rank();
      for (const bool sending : {false, true}) {
        const std::pair<uint32_t, bool> turn{message.header.tag, sending};
        if (std::find(turns.begin(), turns.end(), turn) == turns.end())
          turns.insert(turns.begin() + own.below(turns.size() + 1), turn);
      }
    }
    // In order within a turn: of one sender, receiver and tag, the first sent is the first received.
    for (const auto& [tag, sending] : turns) {
      for (const Message& message : messages)
        if (message.header.tag == tag && (sending ? message.from : message.to) == group_.rank())
          sending ? send(message) : receive(message);
      usleep(own.one_in(4) ? own.below(300) : 0);
    }
  }

  // Waits for all of them and checks what came.
  void finish() {
    Random own(key_of(key_, group_.rank() + 2));
    for (size_t left = works_.size(); left > 0; --left) {
      std::swap(works_[own.below(left)], works_[left - 1]);
      works_[left - 1]->wait(std::nullopt, nullptr);
    }
    for (Receipt& receipt : receipts_) {
      expect(receipt.message.from_any || receipt.from == receipt.message.from, "a message from another rank");
      receipt.message.from = receipt.from;
      const Bytes expected = next_content(receipt.message, received_numbers_);
      expect(expected.empty() || memcmp(receipt.buffer.data(), expected.data(), expected.size()) == 0, "a message");
    }
  }

 private:
  struct Message {
    int from, to;
    bool from_any;
    MessageHeader header;
  };
  struct Receipt {
    Message message;
    Buffer buffer;
    int from;
  };

  using Numbers = std::map<std::tuple<int, int, uint32_t>, uint64_t>;

  // Of the next message of that sender, receiver and tag.
  Bytes next_content(const Message& message, Numbers& numbers) const {
    const auto& [from, to, from_any, header] = message;
    const uint64_t number = numbers[{from, to, header.tag}]++;
    return elements(header.dtype, header.count, key_of(key_of(key_, from, to), header.tag, number));
  }
  void send(const Message& message) {
    sent_.emplace_back(next_content(message, sent_numbers_), 0);
    works_.push_back(group_.messenger().send(message.to, sent_.back().data(), message.header));
  }
  void receive(const Message& message) {
    Receipt& receipt = receipts_.emplace_back(Receipt{message, Buffer(Bytes(message.header.bytes()), 0), any_rank});
    const int source = message.from_any ? any_rank : message.from;
    works_.push_back(group_.messenger().receive(source, receipt.buffer.data(), message.header, &receipt.from));
  }

  Group& group_;
  const uint64_t key_;
  Numbers sent_numbers_, received_numbers_;
  std::deque<Buffer> sent_;
  std::deque<Receipt> receipts_;
  std::vector<std::shared_ptr<Work>> works_;
};
