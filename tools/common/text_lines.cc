// SPDX-License-Identifier: Apache-2.0
#include "common/text_lines.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <limits>
#include <set>

#include "ds/error.h"
#include "ds/nearest.h"

namespace ds::tools {
namespace {

// Members that a user of other tools might expect to have an effect.
constexpr std::string_view kNotHonoured[] = {"tool_choice",
                                             "functions",
                                             "function_call",
                                             "response_format",
                                             "logit_bias",
                                             "best_of",
                                             "suffix",
                                             "echo",
                                             "guided_json",
                                             "guided_regex",
                                             "guided_choice",
                                             "guided_grammar",
                                             "structured_outputs",
                                             "use_beam_search",
                                             "length_penalty",
                                             "bad_words",
                                             "allowed_token_ids",
                                             "typical_p",
                                             "mirostat",
                                             "num_beams",
                                             "audio",
                                             "modalities",
                                             "reasoning_effort"};
// Members about a service or a caller, which no text depends on.
constexpr std::string_view kWithoutEffect[] = {"model", "user", "stream", "metadata", "store", "service_tier"};
// Members of a conversation, for its template.
constexpr std::string_view kOfConversations[] = {
    "messages", "tools", "documents", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"};
constexpr std::string_view kKnown[] = {"prompt",
                                       "messages",
                                       "max_tokens",
                                       "max_completion_tokens",
                                       "min_tokens",
                                       "temperature",
                                       "top_k",
                                       "top_p",
                                       "min_p",
                                       "repetition_penalty",
                                       "presence_penalty",
                                       "frequency_penalty",
                                       "seed",
                                       "stop",
                                       "stop_token_ids",
                                       "ignore_eos",
                                       "logprobs",
                                       "top_logprobs",
                                       "n",
                                       "prompt_logprobs"};

// The members of a request, each read at most once.
class Members {
 public:
  explicit Members(const LineJson& object) : object_(object) {}

  const LineJson* find(std::string_view name) const {
    const auto found = object_.find(std::string(name));
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  template <class T>
  void number(std::string_view name, T& value, double low, double high) const {
    const LineJson* const given = find(name);
    if (given == nullptr) return;
    const bool whole = std::integral<T>;
    const double x = given->is_number() ? given->get<double>() : std::nan("");
    if (!(x >= low && x <= high) || (whole && x != std::floor(x)))
      refuse_line(fmt::format("{} is {}: give {} from {} to {}", name, shown(*given),
                              whole ? "a whole number" : "a number", low, high));
    value = static_cast<T>(x);
  }
  bool flag(std::string_view name) const {
    const LineJson* const given = find(name);
    if (given != nullptr && !given->is_boolean())
      refuse_line(fmt::format("{} is {}: give true or false", name, shown(*given)));
    return given != nullptr && given->get<bool>();
  }
  static std::string shown(const LineJson& value) {
    const std::string text = value.dump(-1, ' ', false, LineJson::error_handler_t::replace);
    return text.size() <= 60 ? text : text.substr(0, 57) + "...";
  }

 private:
  const LineJson& object_;
};

// Other members of a line are its own, so only what is almost the name of one of ours is a mistake.
bool is_typed_for(std::string_view name, std::string_view known) {
  return name.size() >= 4 && edit_distance(name, known) <= 1 + static_cast<i64>(name.size()) / 8;
}

void check_names(const LineJson& object, bool all_known) {
  const auto is_in = [](const auto& list, std::string_view name) {
    return std::ranges::find(list, name) != std::end(list);
  };
  for (const auto& [name, value] : object.items()) {
    if (is_in(kNotHonoured, name) && !value.is_null() && value != LineJson(false))
      refuse_line(name + " is not honoured");
    if (is_in(kKnown, name) || is_in(kWithoutEffect, name) || is_in(kNotHonoured, name)) continue;
    if (is_in(kOfConversations, name)) {
      if (!object.contains("messages")) refuse_line(fmt::format("{} needs messages", name));
      continue;
    }
    const auto near = std::ranges::find_if(kKnown, [&](std::string_view known) { return is_typed_for(name, known); });
    if (near != std::end(kKnown)) refuse_line(fmt::format("{} is unknown: did you mean {}?", name, *near));
    if (all_known) refuse_line(name + " is unknown");
  }
}

std::vector<std::string> stop_strings(const LineJson& given) {
  constexpr size_t kMost = 64;
  std::vector<std::string> stops;
  const LineJson list = given.is_array() ? given : LineJson::array({given});
  for (const LineJson& one : list) {
    if (!one.is_string() || one.get_ref<const std::string&>().empty())
      refuse_line(fmt::format("stop contains {}: give a text, or a list of texts", Members::shown(one)));
    stops.push_back(one.get<std::string>());
  }
  if (stops.size() > kMost) refuse_line(fmt::format("stop has {} texts: give at most {}", stops.size(), kMost));
  return stops;
}

std::vector<i32> token_ids(const LineJson& given, std::string_view name, i64 vocab) {
  std::vector<i32> ids;
  if (!given.is_array()) refuse_line(fmt::format("{} is {}: give a list of token ids", name, Members::shown(given)));
  for (const LineJson& one : given) {
    if (!one.is_number_integer() || one.get<i64>() < 0 || one.get<i64>() >= vocab)
      refuse_line(fmt::format("{} contains {}: ids are from 0 to {}", name, Members::shown(one), vocab - 1));
    ids.push_back(one.get<i32>());
  }
  return ids;
}

// Strict, without duplicate names, and bounded in depth, since others process what is nested by recursion.
LineJson parse_json_line(std::string_view text) {
  constexpr int kMostDepth = 64;
  std::vector<std::set<std::string>> names;
  const auto check = [&](int depth, LineJson::parse_event_t event, const LineJson& parsed) {
    if (depth > kMostDepth) refuse_line(fmt::format("is nested more than {} deep", kMostDepth));
    if (event == LineJson::parse_event_t::object_start) names.emplace_back();
    if (event == LineJson::parse_event_t::object_end) names.pop_back();
    if (event == LineJson::parse_event_t::key && !names.back().insert(parsed.get<std::string>()).second)
      refuse_line(fmt::format("has two members {}", Members::shown(parsed)));
    return true;
  };
  try {
    return LineJson::parse(text, check);
  } catch (const LineJson::exception& e) {
    const std::string_view why = e.what();
    const size_t colon = why.find(": ");
    refuse_line(fmt::format("is not JSON: {}", colon == std::string_view::npos ? why : why.substr(colon + 2)));
  }
}

std::string_view end_name(const TextResult& result) { return result.end == TextResult::End::Stop ? "stop" : "length"; }

}  // namespace

void TextLines::read(TextLine& line, const LineJson& body) const {
  const Members m(body);
  check_names(body, line.is_batch);
  TextRequest r = defaults_;
  const LineJson *const prompt = m.find("prompt"), *const messages = m.find("messages");
  if ((prompt != nullptr) == (messages != nullptr)) refuse_line("needs either a prompt or messages");
  line.is_chat = messages != nullptr;
  if (line.is_chat) {
    LineJson conversation = LineJson::object();
    for (const std::string_view name : kOfConversations) {
      if (const LineJson* const value = m.find(name)) conversation[std::string(name)] = *value;
    }
    r.tokens = codec_.encode_chat(conversation.dump(-1, ' ', false, LineJson::error_handler_t::replace));
  } else if (prompt->is_string()) {
    r.tokens = codec_.encode(prompt->get_ref<const std::string&>());
  } else if (prompt->is_array()) {
    r.tokens = token_ids(*prompt, "prompt", codec_.model_vocab());
  } else {
    refuse_line(fmt::format("prompt is {}: give a text, or a list of token ids", Members::shown(*prompt)));
  }
  if (r.tokens.empty()) refuse_line("the prompt is empty");
  for (const i32 id : r.tokens)
    if (id >= codec_.model_vocab())
      refuse_line(fmt::format("the prompt has the token {}, which is outside the model's vocabulary of {}", id,
                              codec_.model_vocab()));

  constexpr double kMost = std::numeric_limits<i32>::max();
  r.max_tokens = -1;
  m.number("max_tokens", r.max_tokens, 0, kMost);
  m.number("max_completion_tokens", r.max_tokens, 0, kMost);
  const i64 left = context_ - std::ssize(r.tokens);
  if (r.max_tokens < 0) r.max_tokens = std::min(defaults_.max_tokens, std::max<i64>(left, 1));
  if (r.max_tokens > left)
    refuse_line(fmt::format("{} tokens of the prompt and {} new ones exceed the context of {}", r.tokens.size(),
                            r.max_tokens, context_));
  m.number("min_tokens", r.min_tokens, 0, static_cast<double>(r.max_tokens));
  m.number("temperature", r.temperature, 0, 1e6);
  m.number("top_k", r.top_k, -1, kMost);
  r.top_k = std::max<i64>(r.top_k, 0);
  m.number("top_p", r.top_p, 1e-9, 1);
  m.number("min_p", r.min_p, 0, 1);
  m.number("repetition_penalty", r.repetition_penalty, 1e-6, 1e6);
  m.number("presence_penalty", r.presence_penalty, -100, 100);
  m.number("frequency_penalty", r.frequency_penalty, -100, 100);
  m.number("seed", r.seed, 0, std::numeric_limits<u32>::max());
  if (const LineJson* const stop = m.find("stop")) r.stop = stop_strings(*stop);
  if (const LineJson* const ids = m.find("stop_token_ids"))
    r.stop_tokens = token_ids(*ids, "stop_token_ids", codec_.model_vocab());
  r.ignore_end = m.flag("ignore_eos");
  if (const LineJson* const given = m.find("logprobs"); given != nullptr && given->is_boolean()) {
    r.logprobs = given->get<bool>() ? 0 : -1;
    if (m.find("top_logprobs") != nullptr && r.logprobs < 0) refuse_line("top_logprobs needs logprobs");
    m.number("top_logprobs", r.logprobs, 0, 100);
  } else {
    m.number("logprobs", r.logprobs, 0, 100);
  }
  if (m.flag("prompt_logprobs")) {
    r.scored_from = std::ssize(r.tokens) > 1 ? 1 : -1;
  } else if (r.max_tokens == 0) {
    refuse_line("max_tokens is 0, and prompt_logprobs are not asked for");
  }
  i64 n = 1;
  m.number("n", n, 1, 1024);
  if (r.max_tokens == 0 && n > 1) refuse_line("n is more than 1, and max_tokens is 0");
  for (i64 i = 0; i < n; ++i) {
    line.requests.push_back(r);
    line.requests.back().index = static_cast<u32>(i);
    if (i > 0) line.requests.back().scored_from = -1;
  }
}

void refuse_line(const std::string& why) { throw Error(Errc::Config, why); }

TextLine parse_text_line(std::string_view text, i64 number, const std::function<void(TextLine&)>& read) {
  TextLine line{.number = number};
  try {
    LineJson object = parse_json_line(text);
    if (!object.is_object()) refuse_line("is not an object");
    line.object = std::move(object);
    read(line);
  } catch (const Error& e) {
    line.error = e.what();
    line.requests.clear();
  }
  return line;
}

TextLine TextLines::parse(std::string_view text, i64 number) const {
  return parse_text_line(text, number, [&](TextLine& line) {
    line.is_batch = line.object.contains("custom_id") || line.object.contains("body");
    if (!line.is_batch) return read(line, line.object);
    const auto body = line.object.find("body");
    if (body == line.object.end() || !body->is_object()) refuse_line("custom_id without a body");
    read(line, *body);
  });
}

LineJson TextLines::logprobs(const std::vector<TokenScore>& scores) const {
  LineJson list = LineJson::array();
  for (const TokenScore& s : scores) {
    LineJson one = {{"token", codec_.piece(s.id)}, {"id", s.id}, {"logprob", s.logprob}};
    for (const auto& [id, logprob] : s.top)
      one["top_logprobs"].push_back({{"token", codec_.piece(id)}, {"id", id}, {"logprob", logprob}});
    list.push_back(std::move(one));
  }
  return list;
}

LineJson TextLines::choice(const TextLine& line, size_t number, const TextResult& result) const {
  LineJson c = LineJson::object();
  if (line.is_batch || line.requests.size() > 1) c["index"] = number;
  if (line.is_chat && line.is_batch) {
    c["message"] = {{"role", "assistant"}, {"content", result.text}};
  } else {
    c["text"] = result.text;
  }
  if (!line.is_batch) c["tokens"] = result.tokens;
  c["finish_reason"] = end_name(result);
  if (line.requests[number].logprobs >= 0) {
    c["logprobs"] = line.is_batch ? LineJson{{"content", logprobs(result.scores)}} : logprobs(result.scores);
  }
  if (line.requests[number].scored_from >= 0) c["prompt_logprobs"] = logprobs(result.prompt_scores);
  return c;
}

LineJson TextLines::result(const TextLine& line, const std::vector<TextResult>& results) const {
  if (line.is_batch) {
    LineJson all = {{"id", fmt::format("line-{}", line.number)},
                    {"custom_id", line.object.value("custom_id", LineJson())},
                    {"response", nullptr},
                    {"error", nullptr}};
    if (!line.error.empty()) {
      all["error"] = {{"code", "invalid_request"}, {"message", line.error}, {"line", line.number}};
      return all;
    }
    LineJson choices = LineJson::array();
    i64 written = 0;
    for (size_t i = 0; i < results.size(); ++i) {
      choices.push_back(choice(line, i, results[i]));
      written += std::ssize(results[i].tokens);
    }
    const i64 prompt = std::ssize(line.requests[0].tokens);
    all["response"] = {
        {"status_code", 200},
        {"body",
         {{"object", line.is_chat ? "chat.completion" : "text_completion"},
          {"choices", std::move(choices)},
          {"usage", {{"prompt_tokens", prompt}, {"completion_tokens", written}, {"total_tokens", prompt + written}}}}}};
    return all;
  }
  LineJson all = line.object;
  for (const char* ours : {"schema", "text", "tokens", "finish_reason", "choices", "error", "line"}) all.erase(ours);
  if (!line.error.empty()) {
    all["line"] = line.number;
    all["error"] = line.error;
    return all;
  }
  if (results.size() == 1) {
    all.update(choice(line, 0, results[0]));
    return all;
  }
  for (size_t i = 0; i < results.size(); ++i) all["choices"].push_back(choice(line, i, results[i]));
  return all;
}

}  // namespace ds::tools
