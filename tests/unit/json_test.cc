// SPDX-License-Identifier: Apache-2.0
// The JSON reader: valid and refused texts, and the places named in its errors. Also the search for the nearest name.
#include "base/json.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "base/relaxed_json.h"
#include "cpu_time.h"
#include "ds/nearest.h"
#include "temp_directory.h"

namespace ds {
namespace json_test {

std::string failure(std::string_view text, JsonOptions options = {}) {
  try {
    parse_json(text, "f", options);
  } catch (const JsonError& e) {
    return e.what();
  }
  return "accepted";
}

TEST(Json, ReadsCommentsByteOrderMarkAndCrlf) {
  const JsonDocument d =
      parse_json("\xEF\xBB\xBF// head\r\n{\"a\": /* , */ [1, 2.5, \"x\"],\r\n \"b\": null} // tail", "f");
  EXPECT_EQ(d.root.dump(), R"({"a":[1,2.5,"x"],"b":null})");
}

TEST(RelaxedJson, ReadsWhatHjsonHas) {
  for (const auto& [text, json] : {
           std::pair{"{}", "{}"},
           {"# a comment, 'with' \"quotes\" {\n{}# end", "{}"},
           {"{a: 1, b_2: [1, 2,], }", R"({"a":1,"b_2":[1,2]})"},
           {"{\n  a: true, # why, not\n  // , }\n  'b': 'x',\n /* , */ }", R"({"a":true,"b":"x"})"},
           {R"({"a": '# no "comment", // here',})", R"({"a":"# no \"comment\", // here"})"},
           {R"({'it\'s': 'a\\b\n'})", R"({"it's":"a\\b\n"})"},
           {R"({"#": "a,}", "b": "\",]",})", R"({"#":"a,}","b":"\",]"})"},
           {"{null: null, true: [true, {false: false}]}", R"({"null":null,"true":[true,{"false":false}]})"},
           {"\xEF\xBB\xBF{a: 1}", R"({"a":1})"},
           {"[{a: 1,}, {b: 2},]", R"([{"a":1},{"b":2}])"},
           {"{a.b-c: 1, $d: 2}", R"({"a.b-c":1,"$d":2})"},
           {"{ key /* : */ : # :\n 1 }", R"({"key":1})"},
       }) {
    EXPECT_EQ(parse_relaxed_json(text, "f").root.dump(), json) << text;
  }
}

TEST(RelaxedJson, RefusesWhatHidesMistakes) {
  const auto failure = [](std::string_view text) -> std::string {
    try {
      return parse_relaxed_json(text, "f").root.dump();
    } catch (const JsonError& e) {
      return e.what();
    }
  };
  for (const auto& [text, message] : {
           std::pair{"{a: b}", "f:1:5: 'b' is not JSON"},
           {"{a: 1\n b: 2}", "f:2:2: "},
           {"{a: 1,, b: 2}", "f:1:7: "},
           {"{,}", "f:1:2: "},
           {"[,]", "f:1:2: "},
           {"{a:,}", "f:1:4: "},
           {"{a: 1, 'b: 2}", "f:1:8: strings are in double quotes"},
           {"{a: 1, a: 2}", "f:1:8: duplicate key \"a\""},
           {"{'x': 1, b: [c]}", "f:1:14: 'c' is not JSON"},
           {"a: 1", "f:1:1: 'a' is not JSON"},
           {"{a: 'say \"x\"', b: zz}", "f:1:19: 'zz' is not JSON"},
           {"{a: 1} #\n x", "f:2:2: "},
           {"{a: /* open", "f:1:"},
           {"#", "f:1:1: no JSON: the text is empty"},
           {"'", "f:1:1: strings are in double quotes"},
       }) {
    EXPECT_TRUE(failure(text).starts_with(message)) << text << " gave " << failure(text);
  }
}

TEST(RelaxedJson, KnowsPlacesOfTheTextAsItStands) {
  const JsonDocument d = parse_relaxed_json("{ aa: 'it\\'s \"so\"', bb: [1, {cc: 2}],\n  dd: # x\n 3, 'ee': 4 }", "f");
  const auto at = [&](std::string_view path) {
    const JsonPlace p = d.places.at(std::string(path));
    return std::pair(p.line, p.column);
  };
  using P = std::pair<i64, i64>;
  EXPECT_EQ(at("aa"), (P{1, 3}));
  EXPECT_EQ(at("bb"), (P{1, 21}));
  EXPECT_EQ(at("bb[0]"), (P{1, 26}));
  EXPECT_EQ(at("bb[1].cc"), (P{1, 30}));
  EXPECT_EQ(at("dd"), (P{2, 3}));
  EXPECT_EQ(at("ee"), (P{3, 5}));
}

TEST(RelaxedJson, TakesTimeInProportion) {
  std::string text = "{a: [";
  for (int i = 0; i < 200'000; ++i) text += "'x',";
  text += "],}";
  EXPECT_LT(testing::cpu_seconds_of([&] { EXPECT_EQ(parse_relaxed_json(text, "f").root.at("a").size(), 200'000u); }),
            5);
}

TEST(Json, KeepsTheOrderOfMembers) { EXPECT_EQ(parse_json(R"({"z":1,"a":2})", "f").root.dump(), R"({"z":1,"a":2})"); }

TEST(Json, KnowsThePlaceOfEveryMemberAndElement) {
  const JsonDocument d = parse_json(
      "{\n"
      "  \"a\": {\"q\\\"\\\\\": 1},\n"
      "  \"list\": [10 /*,*/, 2.5,//x\n"
      "    \"s,\", [true], {\"k\": 7}, -3e2]\n"
      "}",
      "f");
  const auto at = [&](std::string_view path) {
    const auto it = d.places.find(path);
    return it == d.places.end() ? std::pair<i64, i64>{0, 0} : std::pair{it->second.line, it->second.column};
  };
  using P = std::pair<i64, i64>;
  EXPECT_EQ(at("a"), (P{2, 3}));
  EXPECT_EQ(at(R"(a."q\"\\")"), (P{2, 9}));
  EXPECT_EQ(at("list"), (P{3, 3}));
  EXPECT_EQ(at("list[0]"), (P{3, 12}));
  EXPECT_EQ(at("list[1]"), (P{3, 22}));
  EXPECT_EQ(at("list[2]"), (P{4, 5}));
  EXPECT_EQ(at("list[3]"), (P{4, 11}));
  EXPECT_EQ(at("list[3][0]"), (P{4, 12}));
  EXPECT_EQ(at("list[4].k"), (P{4, 20}));
  EXPECT_EQ(at("list[5]"), (P{4, 29}));
}

TEST(Json, RefusesWithPlaceAndReason) {
  struct Case {
    std::string_view text, message;
  };
  for (const auto& [text, message] : {
           Case{"", "f:1:1: no JSON: the text is empty"},
           Case{" \n\t", "f:1:1: no JSON: the text is empty"},
           Case{"{\"a\": 1,\n \"a\": 2}", "f:2:2: duplicate key \"a\""},
           Case{"{\"a\": 1e400}", "f:1:7: the number 1e400 does not fit a double"},
           Case{"{\"a\": 1e-400}", "f:1:7: the number 1e-400 does not fit a double"},
           Case{"{\"a\":\n -0.001E-330 }", "f:2:2: the number -0.001E-330 does not fit a double"},
           Case{"[0, 1e-400", "f:1:5: the number 1e-400 does not fit a double"},
           Case{"{\"a\": NaN}", "f:1:7: 'NaN' is not JSON"},
           Case{"{\"a\": -Infinity}", "f:1:8: '-Infinity' is not JSON"},
           Case{"{\"a\": True}", "f:1:7: 'True' is not JSON"},
           Case{"{\"a\": 1,}", "f:1:9: a comma before '}'"},
           Case{"[1,\n]", "f:2:1: a comma before ']'"},
           Case{"# x\n{}", "f:1:1: '#' does not start a comment"},
           Case{"{'a': 1}", "f:1:2: strings are in double quotes"},
           Case{"{\"a\": 1} x", "f:1:10: 'x' is not JSON"},
           Case{"{\"a\": 01}", "f:1:8: unexpected number literal; expected '}'"},
           Case{"{\"a\" 1}", "f:1:6: unexpected number literal; expected ':'"},
           Case{"{\"a\": ", "f:1:7: unexpected end of input; expected '[', '{', or a literal"},
           Case{"{\"a\": \"b", "f:1:9: invalid string: missing closing quote"},
           Case{"{\"a\": \"\xff\"}", "f:1:8: invalid string: ill-formed UTF-8 byte"},
           Case{"{\"a\": \"b\nc\"}", "f:1:9: invalid string: control character U+000A (LF) must be escaped"},
           Case{"[1, /* ", "f:1:8: "},
           Case{"\x89HDF\r\n\x1a\n", "f:1:1: this is an HDF5 file, not JSON"},
           Case{"PK\3\4", "f:1:1: this is a zip archive, as PyTorch's files are, not JSON"},
           Case{"\xff\xfe{", "f:1:1: this is UTF-16 text, where UTF-8 is expected, not JSON"},
           Case{std::string_view("{\"a\": \0}", 9), "f:1:1: this is binary data, not JSON"},
           Case{std::string_view("\x40\0\0\0\0\0\0\0{\"a", 11), "f:1:1: this is a safetensors file, not JSON"},
       })
    EXPECT_EQ(failure(text).substr(0, message.size()), message) << text << "\n" << failure(text);
}

TEST(Json, NeverSpeaksInTheLibrarysWords) {
  for (const std::string_view good : {"{\"a\": [1, \"x\\n\", {\"b\": null}], \"c\": -1.5e3}", "[[], {}, true]"}) {
    for (size_t i = 0; i <= good.size(); ++i) {
      for (const std::string_view in : {"", "\x1b", "]", "}", ",", ":", "\"", "\\", "x", "1", "/", "\xc3"}) {
        for (const std::string& text : {std::string(good.substr(0, i)) + std::string(in),
                                        std::string(good.substr(0, i)).append(in).append(good.substr(i))}) {
          const std::string why = failure(text, {.comments = false});
          for (const char* word : {"[json", "parse error", "syntax error", "last read", "\x1b"})
            ASSERT_EQ(why.find(word), why.npos) << text << "\n" << why;
        }
      }
    }
  }
}

TEST(Json, SortedMembersAreReadAlike) {
  EXPECT_EQ(parse_sorted_json(R"({"z": [1, {"y": 2}], "a": 3})", "f").dump(), R"({"a":3,"z":[1,{"y":2}]})");
  EXPECT_THROW(parse_sorted_json(R"({"a": 1, "a": 2})", "f"), JsonError);
  std::string many;
  for (int i = 0; i < 100; ++i) many += fmt::format("{}\"k{}\": {}", i == 0 ? "{" : ",", i, i);
  EXPECT_EQ(parse_sorted_json(many + "}", "f").size(), 100u);
  EXPECT_EQ(parse_json(many + "}", "f").root.size(), 100u);
  for (const char* twice : {"k0", "k20", "k99"})
    EXPECT_NE(failure(fmt::format("{},\"{}\": 1}}", many, twice)).find("duplicate key"), std::string::npos);
}

TEST(Json, DepthIsLimitedOnTheWayDown) {
  const std::string deep(100, '['), close(100, ']');
  EXPECT_EQ(failure(deep + close), "accepted");
  EXPECT_EQ(failure("[" + deep + close + "]"), "f:1:101: nested deeper than 100 levels");
  EXPECT_EQ(failure(std::string(1'000'000, '[')), "f:1:101: nested deeper than 100 levels");
}

TEST(Json, OptionsChooseTheErrorAndForbidComments) {
  try {
    parse_json("{} // c", "f", {.error = Errc::Corrupt, .comments = false});
    FAIL();
  } catch (const JsonError& e) {
    EXPECT_EQ(e.code(), Errc::Corrupt);
    EXPECT_EQ(e.place().column, 4);
  }
}

TEST(Json, IntegersAreExactUpTo64Bits) {
  const Json root = parse_json("[9223372036854775807, -9223372036854775808, 18446744073709551615]", "f").root;
  EXPECT_EQ(root[0].get<i64>(), 9223372036854775807);
  EXPECT_EQ(root[1].get<i64>(), -9223372036854775807 - 1);
  EXPECT_EQ(root[2].get<u64>(), 18446744073709551615u);
}

// A line of metrics of many ranks: paths of its values are nobody's business, and grew with each.
TEST(Json, ManyObjectsInAnArrayTakeTimeByTheirNumber) {
  std::string text = "[";
  for (int i = 0; i < 100'000; ++i) text += fmt::format(R"({}{{"rank":{},"bytes":{{"a":1}}}})", i > 0 ? "," : "", i);
  text += "]";
  for (const bool places : {false, true}) {
    JsonDocument document;
    const double seconds = testing::cpu_seconds_of([&] { document = parse_json(text, "f", {.places = places}); });
    EXPECT_EQ(document.root.size(), 100'000u);
    EXPECT_LT(seconds, 20);
  }
}

// Sixteen megabytes of either kind would ask for gigabytes, and for terabytes.
TEST(Json, PlacesAreBounded) {
  std::string many = "[0";
  for (int i = 1; i < 300'000; ++i) many += ",0";
  const JsonDocument zeros = parse_json(many + "]", "f");
  EXPECT_EQ(zeros.root.size(), 300'000u);
  EXPECT_EQ(zeros.places.size(), 100'000u);
  EXPECT_EQ(zeros.places.at("[99999]").column, 200'000);

  const std::string key(1 << 20, 'k');
  const JsonDocument long_key = parse_json(fmt::format(R"({{"a": 1, "{}": {{"b": {}]}}, "c": [2]}})", key, many), "f");
  EXPECT_EQ(long_key.root[key]["b"].size(), 300'000u);
  EXPECT_EQ(long_key.places.size(), 3u);  // a, c, c[0]
  EXPECT_EQ(long_key.places.at("c[0]").line, 1);
}

TEST(Json, AnIntegerOfAMemberIsHeldToItsRange) {
  const Json object = Json::parse(R"({"a": 3, "b": 1e308, "c": 18446744073709551615, "d": -1, "e": 2.5, "f": "3"})");
  EXPECT_EQ(json_integer(object, "a", 1, 3), 3);
  EXPECT_ERROR(json_integer(object, "a", 1, 2), Errc::Config, "a must be an integer, 1 to 2");
  for (const char* key : {"b", "c", "d", "e", "f"})
    EXPECT_ERROR(json_integer(object, key, 0, 1 << 24), Errc::Config, "must be an integer, 0 to 16777216");
}

TEST(Json, FloatsAreWrittenWithoutTheirBinaryTail) {
  EXPECT_EQ(Json(shortest_decimal(1e-5f)).dump(), "1e-05");
  EXPECT_EQ(Json(shortest_decimal(0.02f)).dump(), "0.02");
  EXPECT_EQ(static_cast<float>(shortest_decimal(1.0f / 3)), 1.0f / 3);
}

TEST(Nearest, CountsEditsAndSwaps) {
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("satge", "stage"), 1);
  EXPECT_EQ(edit_distance("FP16", "fp16"), 0);
}

TEST(Nearest, SuggestsOnlyWhatResembles) {
  constexpr std::array<std::string_view, 4> names = {"stage", "steps", "seed", "train_batch_size"};
  EXPECT_EQ(nearest("stagee", names), "stage");
  EXPECT_EQ(nearest("step", names), "steps");
  EXPECT_EQ(nearest("batch_size", names), "train_batch_size");
  EXPECT_EQ(nearest("zzz", names), "");
  EXPECT_EQ(nearest("", names), "");
}

}  // namespace json_test
}  // namespace ds
