// SPDX-License-Identifier: Apache-2.0
#pragma once
// Builds a DeepspeedTable. One builder per tag: first the model states (names, shapes, counters), then the places of
// the optimizer states, by kind of checkpoint, then the parameters without optimizer state.
//   deepspeed_table.cc   model states, weights, frozen parameters, buffers, ties
//   deepspeed_zero.cc    the optimizer's state of stages 1 to 3
//   deepspeed_whole.cc   whole states: the universal format, and stage 0
//   deepspeed_experts.cc experts, each of which is one rank's of ep: of MoE layers, under a number of that rank's; of
//                        models that AutoEP has converted, as a part of that rank's batches

#include <map>
#include <optional>
#include <set>
#include <unordered_map>

#include "checkpoint/deepspeed_layout.h"
#include "checkpoint/deepspeed_table.h"

namespace ds {

inline constexpr State kMoments[] = {State::ExpAvg, State::ExpAvgSq};

inline i64 numel(const PickleTensor& t) { return *checked_product(t.shape); }
// The integer values of a dict by their keys.
using NumberIndex = std::unordered_map<i64, const PickleValue*>;
NumberIndex index_numbers(const PickleValue& dict);

class DeepspeedBuilder {
 public:
  explicit DeepspeedBuilder(const DeepspeedFiles& files) : files_(files) {}
  DeepspeedTable build();

 private:
  using Value = PickleValue;
  using Kind = PickleValue::Kind;
  using Segments = std::vector<DeepspeedSegment>;
  using Index = std::unordered_map<std::string_view, const Value*>;  // the values of a dict by name

  struct Parameter {
    std::string name;
    std::vector<i64> shape;
    i64 elems = 0;
    bool batch = false;  // AutoEP: matrices of a rank's experts, which are parameters of their own here
    i64 parts() const noexcept { return batch ? shape[0] : 1; }
  };
  // The flat tensors of one rank; null: the optimizer keeps no such state.
  struct RankState {
    size_t file;
    std::vector<const PickleTensor*> master;
    std::array<std::vector<const PickleTensor*>, 2> moments;
  };
  // A group of the optimizer. Its parameters have the names of rank 0; if these are experts, the other ranks of ep have
  // others under the same names.
  struct Group {
    std::vector<Parameter> params;
    i64 ep = 1;
  };
  // A tensor of weights, and its file.
  struct Weight {
    const Value* value = nullptr;
    size_t file = 0;
  };
  // A tensor that an optimizer without names may have updated: a parameter, or equal parts of it that are parameters.
  struct Candidate {
    std::vector<std::string> names;
    std::vector<i64> shape;
    bool expert = false;
  };
  // The states of a group of such an optimizer: master and moments of each parameter that it has updated, in order.
  struct WholeGroup {
    std::string label;  // for messages
    bool moe = false;   // its parameters are experts
    i64 ep = 0;         // on so many ranks, by the name that DeepSpeed has given the group; 0: not stated
    std::vector<std::array<const PickleTensor*, 3>> states;
    std::string problem;  // why these are not read; usually empty
  };
  // A parameter's state at stage 0, as a part of the tensors.
  struct WholeState {
    std::array<const PickleTensor*, 3> tensors;  // master and moments
    size_t file;
    std::vector<i64> shape;  // that they need
    i64 first;               // element of the parameter
    bool operator==(const WholeState&) const = default;
  };
  // The states of an optimizer by parameter, or the reason why they cannot be told apart.
  struct Attribution {
    std::map<std::string, WholeState> states;
    std::string problem;
  };
  // The tensor of all ranks that a parameter is in, and its first element there.
  struct Whole {
    std::string name;
    i64 elems, first;
  };
  // A block whose experts AutoEP has converted.
  struct AutoepLayer {
    std::string block;  // the beginning of its names, "model.layers.3.mlp."
    i64 number;         // of its files
    i64 experts, ep;
    bool shared_gate;  // the shared expert has a gate
  };

  // --- files and values
  size_t open(const std::string& path);
  // The data-parallel rank that wrote file f, if there are several.
  int rank_of(size_t f) const;
  const TorchFile& file(size_t f) const { return *table_.files[f]; }
  // Throws with the path of file f and the rank that wrote it.
  template <class... Args>
  void check(bool ok, Errc code, size_t f, fmt::format_string<Args...> format, Args&&... args) const {
    if (!ok) [[unlikely]]
      throw Error(code, fmt::format("{}: {}", file(f).path(), fmt::format(format, std::forward<Args>(args)...)),
                  rank_of(f));
  }
  static Index index_of(const Value* dict);
  static const Value* look_up(const Index& index, std::string_view name) {
    const auto it = index.find(name);
    return it == index.end() ? nullptr : it->second;
  }
  static i64 integer(const Value& dict, std::string_view key, i64 otherwise) {
    const Value* v = dict.find(key);
    return v != nullptr && v->is(Kind::Int) ? v->integer : otherwise;
  }
  static Segments whole(const PickleTensor& t, size_t f) { return {{0, numel(t), f, &t, 0}}; }
  Segments& segments(State s, size_t param);
  bool& has(State s) { return table_.has[s]; }
  const Value& need(const Value& dict, std::string_view key, Kind kind, size_t f) const;
  std::vector<i64> shape_of(const Value& v, const std::string& name, size_t f) const;
  const PickleTensor& tensor_of(const Value& v, std::string_view what, size_t f) const;
  // A tensor of fp32 state; 16-bit states are converted when they are read.
  const PickleTensor& state_of(const Value& v, std::string_view what, size_t f) const;

  // --- model states
  void read_model_states();
  std::vector<Group> read_groups(const Value& shapes, size_t f) const;
  // The model states of another rank of stage 3.
  void check_same_model(size_t f) const;
  void check_version(const Value& dict, size_t f) const;
  size_t add_param(const std::string& name, const std::vector<i64>& shape, size_t f);
  // A parameter of a group of rank q of ep.
  void add_trained(const Parameter& p, i64 q, i64 ep);
  bool is_stage_3() const;  // every rank has model states of its own

  // --- experts
  void open_experts();
  // The number of ranks that have the experts of these parameters together; 1 if they are not experts.
  i64 expert_ranks(const std::vector<Parameter>& params, size_t f) const;
  // The names over all ranks of a parameter that rank q of ep calls `p.name`: one for each part.
  std::vector<std::string> global_names(const Parameter& p, i64 q, i64 ep) const;
  // The data-parallel ranks among which rank q of ep has copies, of so many.
  std::vector<i64> copies_of(i64 q, i64 ep, i64 num_ranks) const;
  Weight weight_of(std::string_view name) const;
  // The candidates of the optimizer of rank q of ep: these, and that rank's experts.
  std::vector<Candidate> with_experts_of(std::vector<Candidate> candidates, i64 q, i64 ep) const;

  // --- experts of AutoEP
  void read_autoep();
  void check_autoep_files() const;
  const AutoepLayer* autoep_of(std::string_view batch) const;  // that has this batch; null: none
  // "model.layers.3.mlp.experts.5.gate_proj.weight", of the expert that file or batch calls "...experts.w1"
  static std::string autoep_name(const AutoepLayer& layer, std::string_view matrix, i64 expert);
  i64 autoep_ranks(const std::vector<Parameter>& params, size_t f) const;
  // AutoEP appends the routers that it has made to the parameters that a program names.
  std::vector<Candidate> with_routers_last(std::vector<Candidate> candidates) const;
  void add_autoep_candidates(std::vector<Candidate>& candidates, i64 q, i64 ep) const;
  // Stage 3: whether rank r has the experts of rank q of ep, and shares them with `copies`, by its own account.
  void check_autoep_rank(i64 r, i64 q, size_t group, const std::vector<i64>& copies) const;
  // Whether a tensor of the module is a router under a second name.
  bool is_second_router(std::string_view name) const;
  // Names as in the model before it was converted.
  void rename_autoep();

  // --- weights, and what the optimizer does not know
  std::set<std::string_view> buffer_names() const;
  void tie(const std::string& alias, const std::string& target) {
    ties_.emplace_back(alias, target);
    aliases_.insert(alias);
  }
  void set_dtype(size_t param, DType dtype);
  void place_weights();
  DType dtype_of_module() const;  // of its first trained parameter
  // A frozen parameter of stage 3, of which every rank has a chunk.
  Segments frozen_chunks(const std::string& name, i64 elems) const;
  void add_untrained();
  void add_as_it_is(const std::string& name, const std::vector<i64>& shape, DType dtype, Segments at);
  void add_ties();
  void read_config();

  // --- the optimizer's state of ZeRO 1 to 3
  const Value& optimizer_of(size_t f) const;
  // The optimizer's own states of the flat tensors; null if there is none.
  static std::vector<const Value*> flat_states(const Value* base);
  std::optional<i64> scalar(const Value* v, size_t f) const;
  // Adam's step count: with the state of the first flat tensor, or next to the states.
  std::optional<i64> adam_step(const Value& optimizer, const Value* base, size_t f) const;
  static std::optional<i64> stage_of(const Value& optimizer);
  void set_stage(i64 stage);
  // Loss scalers: an object of ZeRO's optimizers, plain entries of those of stage 0.
  void read_scaler(const Value& optimizer);
  void place_partitions();
  void check_rank(const Value& optimizer, size_t f, i64 num_ranks, bool chunked) const;
  RankState read_rank(size_t f, const Value& optimizer, const Value* base, bool chunked) const;
  void add_pieces(size_t param, const std::vector<FlatPiece>& pieces, const std::vector<RankState>& ranks);
  // The same for each part of `p`; the first of them has the number `param`, which becomes that of the next parameter.
  void add_parts(size_t& param, const Parameter& p, const std::vector<FlatPiece>& pieces,
                 const std::vector<RankState>& ranks);
  // Stages 1 and 2.
  void place_groups(const std::vector<RankState>& ranks);
  // The number that each group has in the file of a rank: DeepSpeed's ranks may order those of experts differently.
  std::vector<size_t> places_of_groups(size_t f) const;
  // The entry for group g of the list `key` in the file of rank r; null: there is no such list.
  const Value* of_group(i64 r, std::string_view key, size_t g) const;
  // Group g, whose partitions these ranks have; its first parameter has the number `param`, which becomes that of the
  // next group.
  void place_group(size_t g, const std::vector<RankState>& ranks, const std::vector<i64>& numbers, size_t& param);
  // The parameters of group g in the order of these ranks' own notes.
  std::vector<size_t> noted_order(size_t g, const std::vector<i64>& ranks) const;
  // Every rank also noted which part of each parameter it holds ("param_slice_mappings"), so swapped shards are
  // detected.
  void check_mappings(size_t g, const std::vector<i64>& ranks, const std::vector<i64>& partitions) const;
  // Stage 3.
  void place_chunks(const std::vector<RankState>& ranks);

  // --- whole states
  void place_universal();
  void list_unread();
  void place_whole();
  size_t open_expert_optim(i64 q);
  // The group of this number without its states.
  WholeGroup describe_group(const Value& group, size_t number, size_t f) const;
  // The groups of an optimizer, up to the first that has a problem.
  std::vector<WholeGroup> read_whole_groups(const Value& inner, const Value* masters, size_t f) const;
  void add_whole_state(WholeGroup& group, const Value* master, const Value& state, size_t f) const;
  // Assigns each optimizer state to the only candidate to which it can belong: for each group the first and the last
  // assignment that keeps the order and fits the shapes must be the same, or nothing is assigned.
  Attribution attribute(const std::vector<Candidate>& candidates, const std::vector<WholeGroup>& groups,
                        size_t f) const;
  // Takes the states that the optimizer of this file keeps for these; returns why not.
  std::string attribute(const std::vector<Candidate>& candidates, size_t f);
  // Ties names of the module that are views of the same elements.
  void find_shared_storage();

  const DeepspeedFiles& files_;
  DeepspeedTable table_;
  mutable std::vector<UnfoldingBudget> budgets_;  // by file
  std::vector<size_t> model_, optim_;             // numbers of files, by rank
  const Value* module_ = nullptr;
  Index module_index_;
  const Value* version_ = nullptr;
  std::vector<std::vector<size_t>> group_places_;  // of each rank: places_of_groups
  std::vector<Group> groups_;                      // param_shapes
  std::map<std::string, Weight, std::less<>> expert_weights_;
  std::string expert_type_;
  std::vector<std::vector<std::string>> expert_names_;  // of each layer and expert, in the order of its file
  std::map<std::string, i64, std::less<>> experts_of_;  // by beginning of their names up to the number
  std::vector<AutoepLayer> autoep_;
  std::vector<Whole> wholes_;                              // of each parameter of groups_
  std::vector<std::pair<std::string, std::string>> ties_;  // name, of what
  std::set<std::string, std::less<>> aliases_;             // the names
  std::map<std::string, size_t> number_;                   // of each parameter
  std::vector<Index> fragments_;                           // stage 3: the chunks of frozen parameters, by rank
  std::map<std::string, WholeState> whole_states_;         // stage 0
};

}  // namespace ds
