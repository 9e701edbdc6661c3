// SPDX-License-Identifier: Apache-2.0
// Pickles as data: the values of real ones, and everything that must be refused, by name. Nothing is ever run.

#include "formats/pickle.h"

#include <gtest/gtest.h>

#include "temp_directory.h"
#include "test_data.h"
#include "zip_file.h"

namespace ds {
namespace pickle_test {

using namespace std::string_literals;
using testing::dict;
using testing::global;
using testing::le;
using testing::number;
using testing::numbers;
using testing::pickle;
using testing::storage;
using testing::tensor;
using testing::text;
using Kind = PickleValue::Kind;

// A tensor with what torch calls its metadata.
std::string tensor_with(const std::string& metadata) {
  return global("torch._utils", "_rebuild_tensor_v2") + "(" + storage("FloatStorage", "0", 1) + number(0) +
         numbers({1}) + numbers({1}) + "\x89" + global("collections", "OrderedDict") + ")R" + metadata + "tR";
}
std::string lazy_view(std::string_view key, const std::string& value) {
  return tensor_with("}(" + text(key) + value + "u");
}

Pickle parse(const std::string& body) { return Pickle(pickle(body), "x.pt: data.pkl"); }

TEST(Pickle, PlainValues) {
  const Pickle p = parse(dict({{"none", "N"},
                               {"true", "\x88"},
                               {"false", "\x89"},
                               {"byte", "K\xff"},
                               {"short", "M\xff\xff"},
                               {"int", "J" + le<i32>(-7)},
                               {"long", number(std::numeric_limits<i64>::min())},
                               {"zero", "\x8a\0"s},
                               {"minus", "\x8a\1\xff"},
                               {"big", "\x8a\x09" + std::string(9, '\1')},
                               {"float", "G\x3f\xf8\0\0\0\0\0\0"s},
                               {"bytes", "C\2\0\xff"s},
                               {"tuple", "K\1K\2\x86"},
                               {"empty", ")"},
                               {"list", "](K\1K\2e"},
                               {"set", "\x8f(K\1\x90"}}));
  const PickleValue& d = p.root();
  ASSERT_TRUE(d.is(Kind::Dict));
  EXPECT_TRUE(d.find("none")->is(Kind::None));
  EXPECT_TRUE(d.find("true")->is(Kind::Bool) && d.find("true")->integer == 1 && d.find("false")->integer == 0);
  EXPECT_EQ(d.find("byte")->integer, 255);
  EXPECT_EQ(d.find("short")->integer, 65535);
  EXPECT_EQ(d.find("int")->integer, -7);
  EXPECT_EQ(d.find("long")->integer, std::numeric_limits<i64>::min());
  EXPECT_EQ(d.find("zero")->integer, 0);
  EXPECT_EQ(d.find("minus")->integer, -1);
  EXPECT_TRUE(d.find("big")->is(Kind::BigInt));
  EXPECT_EQ(d.find("float")->real, 1.5);
  EXPECT_EQ(d.find("bytes")->text, "\0\xff"s);
  EXPECT_EQ(d.find("tuple")->items.size(), 2u);
  EXPECT_TRUE(d.find("empty")->is(Kind::Tuple));
  EXPECT_EQ(d.find("list")->items[1]->integer, 2);
  EXPECT_TRUE(d.find("set")->is(Kind::Set));
  EXPECT_EQ(d.find("absent"), nullptr);
}

TEST(Pickle, CallsBecomeRecords) {
  const Pickle p = parse("(" + global("argparse", "Namespace") + ")\x81}" + text("a") + "K\1sb" +
                         global("torch", "device") + text("cpu") + "\x85R" + global("torch", "Size") + numbers({2, 3}) +
                         "\x85R" + global("collections", "OrderedDict") + "](" + text("k") + "K\1\x86" + "e\x85R" +
                         global("__builtin__", "set") + "](K\1e\x85Rt");
  const auto& v = p.root().items;
  ASSERT_EQ(v.size(), 5u);
  EXPECT_EQ(v[0]->text, "argparse.Namespace");
  EXPECT_EQ(v[0]->state->find("a")->integer, 1);
  EXPECT_EQ(v[1]->text, "torch.device");
  EXPECT_EQ(v[1]->items[0]->text, "cpu");
  EXPECT_EQ(v[2]->items.size(), 2u);
  EXPECT_EQ(v[3]->find("k")->integer, 1);
  EXPECT_EQ(v[4]->items.size(), 1u);
}

TEST(Pickle, SharedValuesAreOneValue) {
  const Pickle p = parse("(]q\5h\5h\5t");
  EXPECT_EQ(p.root().items[0], p.root().items[2]);
}

// All of what the fixtures of torch and DeepSpeed hold passes; their names are those of the list.
TEST(Pickle, RecordsOfDeepSpeedKeepTheirFields) {
  const Pickle p = parse(global("deepspeed.runtime.fp16.loss_scaler", "LossScaler") + ")\x81}" + text("cur_scale") +
                         "G\x40\x50\0\0\0\0\0\0"s + "sb");
  EXPECT_EQ(p.root().text, "deepspeed.runtime.fp16.loss_scaler.LossScaler");
  EXPECT_EQ(p.root().state->find("cur_scale")->real, 64);
}

TEST(Pickle, DtypesOfTensorsWithUntypedStorages) {
  const std::string untyped =
      "(" + text("storage") + global("torch.storage", "UntypedStorage") + text("0") + text("cpu") + number(12) + "tQ";
  const std::string v3 = global("torch._utils", "_rebuild_tensor_v3") + "(" + untyped + number(1) + numbers({2}) +
                         numbers({1}) + "\x89" + "N" + global("torch", "uint32") + "tR";
  const Pickle p = parse(v3);
  const PickleTensor& t = *p.root().tensor;
  EXPECT_EQ(t.dtype, DType::U32);
  EXPECT_EQ(t.offset, 1);
}

struct Refusal {
  const char* name;
  std::string bytes;
  Errc code;
  const char* reason;
};
void PrintTo(const Refusal& r, std::ostream* out) { *out << r.name; }

std::string call(const std::string& module, const std::string& name, const std::string& argument) {
  return pickle(global(module, name) + argument + "\x85R");
}

const Refusal kRefusals[] = {
    // code
    {"OsSystem", call("os", "system", text("id")), Errc::Unavailable, "'os.system'"},
    {"PosixSystem", call("posix", "system", text("id")), Errc::Unavailable, "'posix.system'"},
    {"NtSystem", call("nt", "system", text("id")), Errc::Unavailable, "'nt.system'"},
    {"Eval", call("builtins", "eval", text("1")), Errc::Unavailable, "'builtins.eval'"},
    {"Exec", call("__builtin__", "exec", text("1")), Errc::Unavailable, "'__builtin__.exec'"},
    {"Getattr", call("builtins", "getattr", text("1")), Errc::Unavailable, "'builtins.getattr'"},
    {"Subprocess", call("subprocess", "Popen", text("id")), Errc::Unavailable, "'subprocess.Popen'"},
    {"TorchLoad", call("torch", "load", text("x")), Errc::Unavailable, "'torch.load'"},
    {"TorchHub", call("torch.hub", "load", text("x")), Errc::Unavailable, "'torch.hub.load'"},
    {"NumpyLoad", call("numpy", "load", text("x")), Errc::Unavailable, "'numpy.load'"},
    {"Runpy", call("runpy", "_run_code", text("x")), Errc::Unavailable, "'runpy._run_code'"},
    {"DottedName", call("torch", "_utils._rebuild_tensor_v2.__globals__", text("x")), Errc::Unavailable, "__globals__"},
    {"ControlCharacters", call("o\x1b[2Js", "x", text("x")), Errc::Unavailable, "'o?[2Js.x'"},
    {"StackGlobal", pickle(text("os") + text("system") + "\x93"), Errc::Unavailable, "'os.system'"},
    {"Inst", pickle("(" + text("id") + "ios\nsystem\n"), Errc::Unavailable, "opcode INST"},
    {"Obj", pickle("(" + global("torch", "Size") + "o"), Errc::Unavailable, "opcode OBJ"},
    {"Ext", pickle("\x82\1"), Errc::Unavailable, "opcode EXT1"},
    {"NewobjEx", pickle(global("argparse", "Namespace") + ")}\x92"), Errc::Unavailable, "opcode NEWOBJ_EX"},
    {"Int", pickle("I1\n"), Errc::Unavailable, "opcode INT"},
    {"Long4", pickle("\x8b" + le<u32>(1) + "\1"), Errc::Unavailable, "opcode LONG4"},
    {"Persid", pickle("Px\n"), Errc::Unavailable, "opcode PERSID"},
    {"Get", pickle("Ng0\n"), Errc::Unavailable, "opcode GET"},
    {"Dup", pickle("N2"), Errc::Unavailable, "opcode DUP"},
    {"Pop", pickle("NN0"), Errc::Unavailable, "opcode POP"},
    {"ByteArray", pickle("\x96" + le<u64>(0)), Errc::Unavailable, "opcode BYTEARRAY8"},
    {"NextBuffer", pickle("\x97"), Errc::Unavailable, "opcode NEXT_BUFFER"},
    {"Unknown", pickle("\xff"), Errc::Unavailable, "opcode 0xff"},
    {"Protocol0", "(lp0\n.", Errc::Unavailable, "protocol 0 or 1"},
    {"Protocol1", "\x80\1N.", Errc::Unavailable, "protocol 1"},
    {"Protocol6", "\x80\6N.", Errc::Unavailable, "protocol 6"},
    // calls of objects that are no names, states of objects that have none
    {"CallOfAString", pickle(text("x") + ")R"), Errc::Corrupt, "a str is called"},
    {"CallOfARecord", pickle(global("torch", "device") + ")R" + ")R"), Errc::Corrupt, "a object is called"},
    {"CallWithAList", pickle(global("torch", "device") + "]R"), Errc::Corrupt, "with a list for arguments"},
    {"BuildOfADict", pickle("}}b"), Errc::Corrupt, "BUILD of a dict"},
    {"BuildOfAList", pickle("]}b"), Errc::Corrupt, "BUILD of a list"},
    {"BuildOfAName", pickle(global("torch", "device") + "}b"), Errc::Corrupt, "BUILD of a name"},
    {"BuildTwice", pickle(global("argparse", "Namespace") + ")\x81}b}b"), Errc::Corrupt, "for the second time"},
    {"AppendToADict", pickle("}Na"), Errc::Corrupt, "items for a dict, which is not a list"},
    {"SetItemOfAList", pickle("]NNs"), Errc::Corrupt, "items for a list, which is not a dict"},
    {"SetItemsOfARecord", pickle(global("torch", "device") + ")R(NNu"), Errc::Corrupt, "items for a object"},
    {"KeyWithoutValue", pickle("}(Nu"), Errc::Corrupt, "a key without a value"},
    // the stack and the memo
    {"Empty", "", Errc::Corrupt, "an empty pickle"},
    {"StopAtOnce", pickle(""), Errc::Corrupt, "STOP with 0 values"},
    {"StopWithTwo", pickle("NN"), Errc::Corrupt, "STOP with 2 values"},
    {"StopInsideAMark", pickle("N("), Errc::Corrupt, "STOP"},
    {"NoStop", "\x80\2N", Errc::Corrupt, "1 bytes are wanted, 0 are left"},
    {"BytesBehindStop", pickle("N") + "N", Errc::Corrupt, "1 bytes after the end"},
    {"TupleFromNothing", pickle("\x86"), Errc::Corrupt, "a tuple of 2 from a stack of 0"},
    {"TupleAcrossAMark", pickle("N(N\x86"), Errc::Corrupt, "a tuple of 2 from a stack of 1"},
    {"NoMark", pickle("Nt"), Errc::Corrupt, "there is no MARK"},
    {"AppendsWithoutList", pickle("(Ne"), Errc::Corrupt, "empty stack"},
    {"CallFromNothing", pickle("R"), Errc::Corrupt, "empty stack"},
    {"BuildFromNothing", pickle("Nb"), Errc::Corrupt, "empty stack"},
    {"PutOfNothing", pickle("q\1N"), Errc::Corrupt, "empty stack"},
    {"PutBehindAMark", pickle("N(q\1"), Errc::Corrupt, "empty stack"},
    {"GetOfNothing", pickle("h\1"), Errc::Corrupt, "memo 1 was never set"},
    {"LongGetOfNothing", pickle("j" + le<u32>(0xffffffff)), Errc::Corrupt, "memo 4294967295 was never set"},
    {"DeepMarks", pickle(std::string(2000, '(')), Errc::Corrupt, "nested deeper than 1000"},
    {"ProtoInTheMiddle", pickle("\x80\2N"), Errc::Corrupt, "PROTO in the middle"},
    {"FrameBehindTheEnd", pickle("\x95" + le<u64>(1000) + "N"), Errc::Corrupt, "FRAME after the end"},
    {"StringBehindTheEnd", pickle("X" + le<u32>(0xffffffff)), Errc::Corrupt, "4294967295 bytes are wanted"},
    {"NotUtf8", pickle(text("\xff")), Errc::Corrupt, "not UTF-8"},
    {"Surrogate", pickle(text("\xed\xa0\x80")), Errc::Corrupt, "not UTF-8"},
    {"Overlong", pickle(text("\xc0\xaf")), Errc::Corrupt, "not UTF-8"},
    {"CutOffUtf8", pickle(text("\xe2\x82")), Errc::Corrupt, "not UTF-8"},
    {"NameWithoutEnd", pickle("c" + std::string(5000, 'a')), Errc::Corrupt, "a name without end"},
    // storages and tensors
    {"PersistentString", pickle(text("storage") + "Q"), Errc::Corrupt, "persistent id that is not a storage"},
    {"PersistentNumber", pickle("K\1Q"), Errc::Corrupt, "persistent id that is not a storage"},
    {"PersistentOther", pickle("(" + text("module") + "NNNNtQ"), Errc::Corrupt, "persistent id that is not a storage"},
    {"StorageOfNoType", pickle(storage("Size", "0", 1)), Errc::Corrupt, "persistent id that is not a storage"},
    {"StorageOfADtype", pickle(storage("float32", "0", 1)), Errc::Corrupt, "persistent id that is not a storage"},
    {"LongStorageKey", pickle(storage("FloatStorage", std::string(65, '1'), 1)), Errc::Corrupt, "a key of 65 bytes"},
    {"LazyNegative", pickle(lazy_view("neg", "\x88")), Errc::Unavailable, "a lazy view of a tensor ('neg'"},
    {"LazyConjugate", pickle(lazy_view("conj", "\x88")), Errc::Unavailable, "a lazy view of a tensor ('conj'"},
    {"OtherMetadata", pickle(lazy_view("what", "K\1")), Errc::Unavailable, "a lazy view of a tensor ('what'"},
    {"MetadataOfAString", pickle(tensor_with(text("x"))), Errc::Corrupt, "whose metadata is a str"},
    {"NegativeStorage", pickle(storage("FloatStorage", "0", -1)), Errc::Corrupt, "persistent id that is not a storage"},
    {"HugeStorage", pickle(tensor(storage("DoubleStorage", "0", i64{1} << 62), 0, {1}, {1})), Errc::Corrupt,
     "a tensor of torch.DoubleStorage"},
    {"TensorOfAString", pickle(tensor(text("x"), 0, {1}, {1})), Errc::Corrupt, "unknown arguments"},
    {"TensorOfNothing", pickle(global("torch._utils", "_rebuild_tensor_v2") + ")R"), Errc::Corrupt,
     "unknown arguments"},
    {"ParameterOfAString", call("torch._utils", "_rebuild_parameter", text("x")), Errc::Corrupt,
     "a parameter of something"},
    {"FromTypeOfAnotherMaker",
     pickle(global("torch._tensor", "_rebuild_from_type_v2") + "(" + global("torch", "device") +
            global("torch", "Tensor") + ")NtR"),
     Errc::Corrupt, "a tensor that 'torch.device' is to make"},
    {"SizeOfAString", call("torch", "Size", text("x")), Errc::Corrupt, "torch.Size of something other"},
    {"SetOfAString", call("builtins", "set", text("x")), Errc::Corrupt, "a set of something other"},
    {"OrderedDictOfAString", call("collections", "OrderedDict", text("x")), Errc::Corrupt, "a list of pairs"},
    {"OrderedDictOfNumbers", call("collections", "OrderedDict", "](K\1e"), Errc::Corrupt, "a list of pairs"},
};

class PickleRefusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(PickleRefusal, NamesItsReason) {
  EXPECT_ERROR(Pickle(GetParam().bytes, "x.pt: data.pkl"), GetParam().code, GetParam().reason);
  EXPECT_ERROR(Pickle(GetParam().bytes, "x.pt: data.pkl"), GetParam().code, "x.pt: data.pkl: at byte ");
}

INSTANTIATE_TEST_SUITE_P(Hostile, PickleRefusal, ::testing::ValuesIn(kRefusals),
                         [](const auto& p) { return std::string(p.param.name); });

// Not among kRefusals: every start of this program would make them.
TEST(Pickle, RefusesWhatIsTooLong) {
  EXPECT_ERROR(Pickle(pickle("(" + std::string((2 << 20) + 1, ']') + "t"), "x"), Errc::Corrupt,
               "more than 2097152 values");
  EXPECT_ERROR(Pickle(pickle(std::string((64 << 20) + 1, 'N')), "x"), Errc::Corrupt, "at most 67108864 are read");
}

// Doubling a tuple of itself 60 times makes 2^60 leaves out of 60 values.
TEST(Pickle, MemoDuplicationCostsNothing) {
  std::string body = "Nq\0"s;
  for (char i = 0; i < 60; ++i) body += "h"s + i + "h" + i + "\x86q" + static_cast<char>(i + 1);
  const Pickle p = parse("(" + body + "t");
  EXPECT_LT(p.values().size(), 200u);
}

// A call copies its arguments: thousands of calls with the same large tuple are refused before they fill the memory.
TEST(Pickle, CallsWithSharedArgumentsAreBounded) {
  std::string calls = "(" + std::string(100000, 'N') + "tq\1(";
  for (int i = 0; i < 1000; ++i) calls += global("torch", "device") + "h\1R";
  EXPECT_ERROR(parse("(" + calls + "tt"), Errc::Corrupt, "calls with more than");
  std::string lists = "(](" + std::string(100000, 'N') + "e\x85q\1(";
  for (int i = 0; i < 1000; ++i) lists += global("builtins", "set") + "h\1R";
  EXPECT_ERROR(parse(lists + "tt"), Errc::Corrupt, "calls with more than");
}

TEST(Pickle, TensorsOfManyDimsAreBounded) {
  const std::vector<i64> ones(64, 1);
  std::string calls = global("torch._utils", "_rebuild_parameter") + "q\1(" +
                      tensor(storage("FloatStorage", "0", 1), 0, ones, ones) + "tq\2";
  for (int i = 0; i < 200000; ++i) calls += "h\1h\2R";
  EXPECT_ERROR(parse("(" + calls + "t"), Errc::Corrupt, "calls with more than");
}

TEST(Pickle, MetadataThatSaysNothing) {
  for (const std::string& metadata : {"N"s, "}"s, "}("s + text("neg") + "\x89" + text("conj") + "\x89u"s}) {
    EXPECT_TRUE(parse(tensor_with(metadata)).root().is(Kind::Tensor));
  }
}

TEST(Pickle, DeepNestingNeedsNoDeepStack) {
  constexpr int kDepth = 1000000;
  const Pickle p = parse("N" + std::string(kDepth, '\x85'));
  EXPECT_EQ(p.values().size(), static_cast<size_t>(kDepth) + 3);
}

TEST(Pickle, AListMayHoldItself) {
  const Pickle p = parse("]q\1h\1a");
  EXPECT_EQ(p.root().items[0], &p.root());
}

}  // namespace pickle_test
}  // namespace ds
