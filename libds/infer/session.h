// SPDX-License-Identifier: Apache-2.0
#pragma once
// Continues many sequences at once with the weights of a stage: continuous batching (Yu et al., "Orca", 2022) with
// prompts in chunks (Agrawal et al., "Sarathi", 2023), and caches in blocks (Kwon et al., "PagedAttention", 2023).
//
// The results of a sequence depend only on its own tokens and options: not on other sequences, on the order in which
// they were added, on the size of passes, on the room in the caches, or on proposed tokens.

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "infer/blocks.h"
#include "infer/sampler.h"
#include "infer/session_plan.h"
#include "stage/stage.h"

namespace ds::infer {

struct Request {
  std::vector<i32> tokens;  // the prompt: at least one
  i64 max_tokens = 1;       // new ones; 0: the prompt is only scored, from a token before its end
  Sampling sampling{};
  // Listener::scored is called for tokens[i] with i >= scored_from >= 1; -1: for none.
  i64 scored_from = -1;
  bool logprobs = false;  // Row::logprob of new tokens is wanted
  // It does not end after max_tokens, but rests wherever follow() says. For drafts.
  bool follows = false;
};

class Session;

// A row of logits before temperature and penalties, valid during the call.
struct Row {
  Session& session;
  size_t index;                // in its pass
  i32 most_likely = 0;         // the first of the most likely tokens
  float logprob = 0;           // natural logarithm of the probability of the token after it, by these logits
  float top = 0, log_sum = 0;  // the largest logit; the logarithm of the sum of e^(logit - top)

  // Copied from the device. Valid until the next call for any row.
  std::span<const float> logits() const;
  // The logarithm for a token with this logit, if logarithms were asked for.
  float logprob_of(float logit) const noexcept { return 0 - (log_sum - (logit - top)); }
};

// Guesses the next tokens of sequences, which a session verifies in one pass (Leviathan et al., "Fast Inference from
// Transformers via Speculative Decoding", 2023). A guess stands if it is the token that the session draws at its place,
// so guesses decide the number of passes alone. Ranks that share a session must guess alike.
struct Proposer {
  struct Place {
    u64 id;  // Session::Id
    const Request& request;
    std::span<const i32> text;  // the prompt, and the tokens after it
    i64 most;                   // guesses that can be verified
    std::vector<i32> tokens{};  // to be filled in: the guesses, ids of the model
  };
  virtual ~Proposer() = default;
  virtual void propose(std::span<Place> places) = 0;
  // The sequence has ended, or is put off.
  virtual void forget(u64 id) = 0;
};

class Session {
 public:
  using Id = u64;  // of a request; they count up

  struct Listener {
    virtual ~Listener() = default;
    // A new token. False: the sequence ends with it.
    virtual bool token(Id id, i32 token, const Row& row) = 0;
    // Token `at` of a prompt.
    virtual void scored(Id id, i64 at, const Row& row) = 0;
    // Logits that its next token needs are not finite; `ended` follows. By default throws Errc::Numeric, after which
    // the session must not be used.
    virtual void failed(Id id, const std::string& why);
    // The sequence has ended, and its id is not used again.
    virtual void ended(Id id) = 0;
  };

  // Takes all memory. `stage` and `proposer` outlive it. A proposer needs sizes with draft_tokens. Throws
  // Errc::OutOfMemory.
  Session(stage::Stage& stage, const SessionSizes& sizes, Proposer* proposer = nullptr);
  ~Session();

  // All ranks call these functions in the same order with the same arguments, and listeners answer alike.

  // A sequence takes its turn after those added before. Its tokens and max_tokens must fit the context.
  Id add(Request request);
  // Ends it without a call of `ended`; nothing happens if it has ended.
  void cancel(Id id);
  // One pass, if there is something to do here or on a rank that has other experts; false: there is not. Throws
  // what the listener throws.
  bool step(Listener& listener);
  // Replaces the text of a request that `follows` by this one, which begins like the text of the last call, and so many
  // tokens are drawn after it; together at most the prompt and max_tokens. Keys of equal tokens are kept.
  void follow(Id id, std::span<const i32> text, i64 new_tokens);
  bool idle() const noexcept { return waiting_.empty() && under_way_.empty(); }
  i64 num_waiting() const noexcept { return std::ssize(waiting_); }
  i64 num_under_way() const noexcept { return std::ssize(under_way_); }

  // Totals so far.
  struct Counts {
    i64 passes = 0, rows = 0;  // rows: tokens that layers have processed
    i64 reused = 0;            // tokens whose keys were found in blocks of other sequences
    i64 put_off = 0;           // sequences that gave up their blocks and were computed again
    // Proposed tokens, but for those after the end of their text; and those of them that stood.
    i64 proposed = 0, accepted = 0;
  };
  const Counts& counts() const noexcept { return counts_; }

 private:
  struct Sequence;
  struct Part {  // of a pass
    Sequence* sequence;
    i64 tokens;
  };

  void take_memory();
  bool fits(const Sequence& s) const;
  void begin_waiting();
  void begin(std::unique_ptr<Sequence> sequence);
  bool shares_blocks() const noexcept;
  Blocks::Prefix prefix_of(const Sequence& s, i64 block) const;
  void reuse_blocks(Sequence& s);
  void close_blocks(Sequence& s);
  bool take_blocks(Sequence& s, i64 tokens);
  void give_back_blocks(Sequence& s);
  void put_off_last();
  void propose();
  std::vector<Part> choose_parts();
  void upload(std::span<const Part> parts);
  i64 largest_pass(std::span<const Part> parts) const;
  void run_layers(std::span<const Part> parts, i64 largest);
  void draw();
  void sample_rows();
  void compute_losses();
  void deliver(std::span<const Part> parts, Listener& listener);
  bool deliver_rows(Sequence& s, size_t& row, Listener& listener);
  friend Row;
  std::span<const float> logits_of(size_t row);

  stage::Stage& stage_;
  Proposer* proposer_;
  const model::Model& model_;
  const plan::RunPlan& plan_;
  Device& device_;
  SessionPlan planned_;
  model::PassMemory memory_;
  std::vector<Buffer> buffers_;
  Buffer working_, temporary_, message_, tables_, sequences_, cache_, looked_up_;
  std::vector<Blocks> blocks_;                   // of SessionPlan::spaces
  std::vector<std::vector<TensorView>> arrays_;  // by layer
  std::deque<std::unique_ptr<Sequence>> waiting_;
  std::vector<std::unique_ptr<Sequence>> under_way_;  // in the order in which they were added
  std::vector<bool> places_;                          // taken
  Id next_ = 0;
  Counts counts_;
  // The pass in progress: its rows; the tokens whose logits are wanted, and their rows; those tokens.
  enum class Logits : u8 {
    Sound,
    Infinite,  // or NaN: an error if the text comes to them
    Refuted,   // after a proposed token that does not stand
  };
  struct Wanted {
    Sequence* sequence;
    i64 at;
    Logits logits = Logits::Sound;

    bool draws() const noexcept;  // else its token is given
    bool has_logprob() const noexcept;
  };
  std::vector<Wanted> wanted_;
  std::vector<i32> ids_, positions_, rotations_, logit_rows_, targets_;
  std::vector<Draw> draws_;
  std::vector<LogitChange> changes_;
  std::vector<i32> drawn_;     // the tokens of all rows, then the most likely ones
  std::vector<float> logits_;  // of one row, unless the host reads those of the device
  std::vector<float> losses_, tops_, sums_;
};

}  // namespace ds::infer
