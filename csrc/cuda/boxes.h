// Boxes for small tensors: words that show by themselves that they have come, so that no flag follows them.
//
// A word travels with all its bits turned, and a box is zero before. A word of 0 has not come. The one word that would
// travel as 0, all ones, travels as its neighbour; in every floating-point type both are NaN.
//
// Block b of a rank has a box from each peer, three times. Calls of the block take the three in turns: one for this call,
// one that peers may already fill for the next, and the box of the call before, which is cleared. No peer can be two
// calls ahead: it needs words of the call between from this rank, which sends them only after its launch of this call
// has ended, and with it the clearing. A block counts its calls in its own memory, so a CUDA graph can replay them.
//
// Boxes lie in the signal pad, behind the flags. A box has a line of 16 bytes for the call's signature, and one for each
// thread of the block. A block may use the boxes of several blocks, if no other block of the launch does.
#pragma once
#include "flags.h"

namespace weft::cuda {

using Line = Packed<uint32_t>;
constexpr int line_words = pack_bytes / static_cast<int>(sizeof(uint32_t));
constexpr int turns = 3;
constexpr int most_small_blocks = 8;

// Where boxes begin in the pad: at a line.
WEFT_ON_BOTH size_t first_box_word(int world, int blocks) {
  return (word_number(world, blocks, 1, 0) + line_words - 1) / line_words * line_words;
}

WEFT_ON_BOTH size_t box_words(int world, int threads) {  // of one block
  return static_cast<size_t>(turns) * world * (threads + 1) * line_words;
}

// The boxes of block number `block`, in this call's turn.
template <class Here>
class Boxes {
 public:
  WEFT_ON_DEVICE Boxes(Here& here, const Group& group, int block)
      : here_(here), group_(group), begin_(first_box_word(group.world, group.blocks) +
                                           block * box_words(group.world, here.threads())) {
    turn_ = here.read(count());
  }

  // Writes to line `number` of this rank's box at every peer, beginning with the next rank.
  WEFT_ON_DEVICE void send(int number, Line words) {
    WEFT_UNROLL
    for (int k = 0; k < line_words; ++k) words.values[k] = ~words.values[k] == 0 ? 1u : ~words.values[k];
    WEFT_ROLLED
    for (int step = 1; step < group_.world; ++step) {
      const int peer = (group_.rank + step) % group_.world;
      here_.write_line(line(peer, turn_, group_.rank, number), words);
    }
  }
  // Returns whether line `number` has come from the peer, and if so the words.
  WEFT_ON_DEVICE bool has_come(int peer, int number, Line& words) {
    words = here_.read_line(line(group_.rank, turn_, peer, number));
    bool come = true;
    WEFT_UNROLL
    for (int k = 0; k < line_words; ++k) come = come && words.values[k] != 0, words.values[k] = ~words.values[k];
    return come;
  }
  // Clears line `number` of every peer's box of the call before.
  WEFT_ON_DEVICE void clear(int number) {
    WEFT_ROLLED
    for (int peer = 0; peer < group_.world; ++peer)
      if (peer != group_.rank) here_.write_line(line(group_.rank, (turn_ + 2) % turns, peer, number), Line{});
  }
  // Ends the call. For one thread, after all threads have begun.
  WEFT_ON_DEVICE void next_turn() { here_.write(count(), (turn_ + 1) % turns); }

 private:
  WEFT_ON_DEVICE uint32_t* line(int owner, int turn, int setter, int number) const {
    const size_t box = static_cast<size_t>(turn) * group_.world + setter;
    return group_.pads[owner] + begin_ + (box * (here_.threads() + 1) + number) * line_words;
  }
  // The turn stands where a box from the rank itself would be.
  WEFT_ON_DEVICE uint32_t* count() const { return line(group_.rank, 0, group_.rank, 0); }

  Here& here_;
  const Group& group_;
  size_t begin_;
  int turn_;
};

}  // namespace weft::cuda
