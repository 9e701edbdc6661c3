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

constexpr double kMostTop = 100;
constexpr i64 kMostScores = 200'000;  // of a line, which is written as a whole

// Members that a user of other tools might expect to have an effect.
constexpr std::string_view kNotHonoured[] = {
    "tool_choice", "functions", "function_call", "response_format", "logit_bias", "best_of", "suffix", "echo",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "use_beam_search",
    "length_penalty", "bad_words", "allowed_token_ids", "typical_p", "mirostat", "num_beams", "audio", "modalities",
    "reasoning_effort",
    // of transformers, llama.cpp and vLLM
    "max_new_tokens", "min_new_tokens", "max_length", "min_length", "do_sample", "num_return_sequences",
    "no_repeat_ngram_size", "eos_token_id", "stop_strings", "suppress_tokens", "bad_words_ids", "epsilon_cutoff",
    "eta_cutoff", "n_predict", "repeat_penalty", "grammar", "json_schema", "samplers", "dry_multiplier",
    "prompt_token_ids", "include_stop_str_in_output", "truncate_prompt_tokens", "skip_special_tokens", "prompt_embeds"};
// Members about a service or a caller, which no text depends on.
constexpr std::string_view kWithoutEffect[] = {"model", "user",         "stream",         "metadata",
                                               "store", "service_tier", "stream_options", "parallel_tool_calls"};
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
  return name.size() > 4 && known.size() > 4 && edit_distance(name, known) <= 1 + static_cast<i64>(name.size()) / 8;
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

// A model of texts cannot look at what else a message may have.
void check_parts(const LineJson& messages) {
  for (const LineJson& message : messages.is_array() ? messages : LineJson::array()) {
    const LineJson content = message.is_object() ? message.value("content", LineJson()) : LineJson();
    for (const LineJson& part : content.is_array() ? content : LineJson::array()) {
      const std::string type =
          part.is_object() && part.contains("type") && part["type"].is_string() ? part["type"] : "text";
      if (type != "text") refuse_line(fmt::format("a message has a part of type {}: give text", type));
    }
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
    std::string_view reason = colon == std::string_view::npos ? why : why.substr(colon + 2);
    if (const size_t end = reason.find("] "); reason.starts_with('[') && end != std::string_view::npos)
      reason.remove_prefix(end + 2);
    refuse_line(fmt::format("is not JSON: {}", reason));
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
    check_parts(*messages);
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
  if (m.find("max_completion_tokens") != nullptr && r.max_tokens >= 0)
    refuse_line("has both max_tokens and max_completion_tokens");
  m.number("max_completion_tokens", r.max_tokens, 0, kMost);
  const i64 left = context_ - std::ssize(r.tokens);
  if (r.max_tokens < 0) r.max_tokens = std::min(defaults_.max_tokens, std::max<i64>(left, 1));
  if (const i64 over = r.max_tokens - left; over > 0) {
    const bool may_cut = over < std::ssize(r.tokens);
    if (!cuts_ || !may_cut)
      refuse_line(fmt::format("{} tokens of the prompt and {} new ones exceed the context of {}{}", r.tokens.size(),
                              r.max_tokens, context_, may_cut ? ": --cut leaves out the beginning of the prompt" : ""));
    r.tokens.erase(r.tokens.begin(), r.tokens.begin() + over);
  }
  m.number("min_tokens", r.min_tokens, 0, static_cast<double>(r.max_tokens));
  m.number("temperature", r.temperature, 0, 1e6);
  m.number("top_k", r.top_k, -1, kMost);
  r.top_k = std::max<i64>(r.top_k, 0);
  m.number("top_p", r.top_p, 0, 1);
  m.number("min_p", r.min_p, 0, 1);
  m.number("repetition_penalty", r.repetition_penalty, 1e-6, 1e6);
  m.number("presence_penalty", r.presence_penalty, -100, 100);
  m.number("frequency_penalty", r.frequency_penalty, -100, 100);
  u64 seed = r.seed;                                // of 64 bits in OpenAI's format
  m.number("seed", seed, 0, 0x1.fffffffffffffp62);  // below 2^63
  r.seed = static_cast<u32>(seed) ^ static_cast<u32>(seed >> 32);
  if (const LineJson* const stop = m.find("stop")) r.stop = stop_strings(*stop);
  if (const LineJson* const ids = m.find("stop_token_ids"))
    r.stop_tokens = token_ids(*ids, "stop_token_ids", codec_.model_vocab());
  r.ignore_end = m.flag("ignore_eos");
  const LineJson* const logprobs = m.find("logprobs");
  if (logprobs != nullptr && logprobs->is_boolean()) {
    r.logprobs = logprobs->get<bool>() ? 0 : -1;
  } else {
    m.number("logprobs", r.logprobs, 0, kMostTop);
  }
  if (m.find("top_logprobs") != nullptr) {
    if (r.logprobs < 0 || !logprobs->is_boolean()) refuse_line("top_logprobs needs logprobs to be true");
    m.number("top_logprobs", r.logprobs, 0, kMostTop);
  }
  line.scores_prompt = m.flag("prompt_logprobs");
  if (line.scores_prompt && std::ssize(r.tokens) > 1) r.scored_from = 1;
  if (r.max_tokens == 0 && r.scored_from < 0)
    refuse_line(line.scores_prompt ? "max_tokens is 0, and a prompt of one token has no prompt_logprobs"
                                   : "max_tokens is 0, and prompt_logprobs are not asked for");
  i64 n = 1;
  m.number("n", n, 1, 1024);
  if (r.max_tokens == 0 && n > 1) refuse_line("n is more than 1, and max_tokens is 0");
  const i64 scored = (r.logprobs >= 0 ? n * r.max_tokens : 0) + (line.scores_prompt ? std::ssize(r.tokens) : 0);
  if (const i64 all = scored * (1 + std::max<i64>(r.logprobs, 0)); all > kMostScores)
    refuse_line(fmt::format("asks for up to {} logarithms of probability, and a line may have {}", all, kMostScores));
  for (i64 i = 0; i < n; ++i) {
    line.requests.push_back(r);
    line.requests.back().index = static_cast<u32>(i);
    if (i > 0) line.requests.back().scored_from = -1;
  }
}

void refuse_line(const std::string& why) { throw Error(Errc::Config, why); }

std::string members_of(std::string_view text, std::span<const std::string_view> without) {
  std::string kept;
  const auto end_of_string = [&](size_t at) {
    for (++at; text[at] != '"'; ++at) at += text[at] == '\\';
    return at + 1;
  };
  size_t at = text.find('{') + 1;
  const size_t end = text.rfind('}');
  while ((at = text.find_first_not_of(" \t\r\n,", at)) < end) {
    const size_t begin = at, name_end = end_of_string(at);
    const std::string name = LineJson::parse(text.substr(begin, name_end - begin));
    int depth = 0;
    for (at = name_end; at < end && (depth > 0 || text[at] != ','); ++at) {
      if (text[at] == '"') at = end_of_string(at) - 1;
      depth += text[at] == '{' || text[at] == '[' ? 1 : text[at] == '}' || text[at] == ']' ? -1 : 0;
    }
    if (std::ranges::find(without, name) != without.end()) continue;
    std::string_view member = text.substr(begin, at - begin);
    member.remove_suffix(member.size() - member.find_last_not_of(" \t\r\n") - 1);
    kept += fmt::format("{}{}", kept.empty() ? "" : ",", member);
  }
  return kept;
}

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
    const auto body = line.object.find("body");
    line.is_batch = body != line.object.end();
    if (!line.is_batch) return read(line, line.object);
    if (!body->is_object()) refuse_line("body is not an object");
    for (const auto& [name, value] : line.object.items())
      if (name != "custom_id" && name != "method" && name != "url" && name != "body")
        refuse_line(fmt::format("{} stands beside body: it belongs into it", name));
    if (line.object.value("method", LineJson("POST")) != LineJson("POST")) refuse_line("method is not POST");
    const bool chat = body->contains("messages");
    const LineJson url = line.object.value("url", LineJson());
    if (!url.is_null() && url != LineJson(chat ? "/v1/chat/completions" : "/v1/completions"))
      refuse_line(
          fmt::format("url {} does not fit a body with {}", Members::shown(url), chat ? "messages" : "a prompt"));
    read(line, *body);
  });
}

namespace {

bool is_utf8(const std::string& text) {
  try {
    static_cast<void>(LineJson(text).dump());
    return true;
  } catch (const LineJson::exception&) {
    return false;
  }
}

}  // namespace

LineJson token_json(const TextCodec& codec, i32 id, bool has_bytes) {
  const std::string text = codec.token_text(id);
  LineJson one = {{"token", text}};
  if (has_bytes || !is_utf8(text))
    one["bytes"] = std::vector<int>(reinterpret_cast<const u8*>(text.data()),
                                    reinterpret_cast<const u8*>(text.data()) + text.size());
  return one;
}

LineJson TextLines::logprobs(const std::vector<TokenScore>& scores, bool bytes) const {
  LineJson list = LineJson::array();
  const auto json_of = [&](i32 id, float logprob) {
    LineJson one = token_json(codec_, id, bytes);
    one["id"] = id, one["logprob"] = logprob;
    return one;
  };
  for (const TokenScore& s : scores) {
    LineJson one = json_of(s.id, s.logprob);
    for (const auto& [id, logprob] : s.top) one["top_logprobs"].push_back(json_of(id, logprob));
    list.push_back(std::move(one));
  }
  return list;
}

// The form of OpenAI's completions.
LineJson TextLines::completion_logprobs(const std::vector<TokenScore>& scores) const {
  LineJson all = {{"tokens", LineJson::array()},
                  {"token_logprobs", LineJson::array()},
                  {"top_logprobs", LineJson::array()},
                  {"text_offset", LineJson::array()}};
  size_t offset = 0;
  for (const TokenScore& s : scores) {
    const std::string text = codec_.token_text(s.id);
    all["tokens"].push_back(text);
    all["token_logprobs"].push_back(s.logprob);
    LineJson top = LineJson::object();
    for (const auto& [id, logprob] : s.top) top[codec_.token_text(id)] = logprob;
    all["top_logprobs"].push_back(std::move(top));
    all["text_offset"].push_back(offset);
    offset += text.size();
  }
  return all;
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
    c["logprobs"] =
        line.is_batch ? LineJson{{"content", logprobs(result.scores, true)}} : logprobs(result.scores, false);
  }
  if (line.scores_prompt && number == 0) c["prompt_logprobs"] = logprobs(result.prompt_scores, line.is_batch);
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
         {{"id", fmt::format("line-{}", line.number)},
          {"object", line.is_chat ? "chat.completion" : "text_completion"},
          {"created", 0},  // a time would be another in each run
          {"model", line.object["body"].value("model", LineJson(""))},
          {"choices", std::move(choices)},
          {"usage", {{"prompt_tokens", prompt}, {"completion_tokens", written}, {"total_tokens", prompt + written}}}}}};
    return all;
  }
  if (!line.error.empty()) return {{"line", line.number}, {"error", line.error}};
  LineJson all = LineJson::object();
  if (results.size() == 1) {
    all.update(choice(line, 0, results[0]));
    return all;
  }
  for (size_t i = 0; i < results.size(); ++i) all["choices"].push_back(choice(line, i, results[i]));
  return all;
}

std::string TextLines::members(const TextLine& line, std::string_view text) const {
  constexpr std::string_view kOurs[] = {"schema", "text", "tokens",   "finish_reason",  "choices",
                                        "error",  "line", "logprobs", "prompt_logprobs"};
  return line.is_batch || line.object.empty() ? "" : members_of(text, kOurs);
}

}  // namespace ds::tools
