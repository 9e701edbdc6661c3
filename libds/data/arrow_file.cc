// SPDX-License-Identifier: Apache-2.0
// Tables of Apache Arrow and Parquet, read by Arrow's own library, where the build has it (DS_ARROW): records as JSONL
// has them, batch by batch. What a file can make the library allocate is bounded.

#include "data/records.h"

#ifdef DS_ARROW
#include <arrow/api.h>
#include <arrow/io/file.h>
#include <arrow/ipc/reader.h>
#include <parquet/arrow/reader.h>

#include <atomic>
#endif

#include "base/check.h"

namespace ds {

#ifndef DS_ARROW

std::unique_ptr<TokenFile> open_arrow_file(const std::string& path, DataFormat format, const TextEncoding&) {
  auto file = std::make_unique<TokenFile>();
  file->map(path);  // whether it is there at all
  throw Error(Errc::Unavailable, fmt::format("data file '{}' is {}, and this build has no Apache Arrow (DS_ARROW of "
                                             "CMake): convert it to JSONL",
                                             path, format == DataFormat::Parquet ? "Parquet" : "Arrow"));
}

#else

namespace {

constexpr i64 kMostRecordBytes = i64{64} << 20;  // as of a line of JSONL
constexpr i64 kMostBytes = i64{2} << 30;         // that a file makes the library allocate at a time
constexpr i64 kBatchRows = 1024;

// The library's memory, as much as kMostBytes of it. It is never destroyed, for threads of the library give memory back
// when nobody waits for them any more.
class BoundedPool final : public arrow::MemoryPool {
 public:
  static BoundedPool& instance() {
    static auto* const pool = new BoundedPool;
    return *pool;
  }
  arrow::Status Allocate(i64 size, i64 alignment, u8** out) override {
    ARROW_RETURN_NOT_OK(has_room(size));
    return pool_->Allocate(size, alignment, out);
  }
  arrow::Status Reallocate(i64 old_size, i64 new_size, i64 alignment, u8** ptr) override {
    ARROW_RETURN_NOT_OK(has_room(new_size - old_size));
    return pool_->Reallocate(old_size, new_size, alignment, ptr);
  }
  void Free(u8* buffer, i64 size, i64 alignment) override { pool_->Free(buffer, size, alignment); }
  i64 bytes_allocated() const override { return pool_->bytes_allocated(); }
  i64 max_memory() const override { return pool_->max_memory(); }
  i64 total_bytes_allocated() const override { return pool_->total_bytes_allocated(); }
  i64 num_allocations() const override { return pool_->num_allocations(); }
  std::string backend_name() const override { return "bounded"; }

 private:
  arrow::Status has_room(i64 bytes) const {
    if (bytes <= kMostBytes - pool_->bytes_allocated()) return arrow::Status::OK();
    return arrow::Status::OutOfMemory("it asks for more than ", kMostBytes >> 20, " MiB at a time");
  }
  arrow::MemoryPool* const pool_ = arrow::default_memory_pool();
};

class ArrowFile {
 public:
  ArrowFile(const std::string& path, DataFormat format)
      : path_(path), kind_(format == DataFormat::Parquet ? "Parquet" : "Arrow") {
    guarded([&] { format == DataFormat::Parquet ? open_parquet() : open_arrow(); });
  }

  const std::shared_ptr<arrow::Schema>& schema() const noexcept { return schema_; }
  std::string_view kind() const noexcept { return kind_; }
  // The next batch; null: there is no more. What it says of itself has been checked.
  std::shared_ptr<arrow::RecordBatch> next() {
    std::shared_ptr<arrow::RecordBatch> batch;
    guarded([&] {
      batch = value(next_());
      if (batch != nullptr) check(batch->ValidateFull());
    });
    return batch;
  }
  [[noreturn]] void refuse(const std::string& why) const {
    throw Error(Errc::Corrupt, fmt::format("data file '{}': {}", path_, why));
  }
  std::string place(i64 row) const { return fmt::format("{}: row {}", path_, row); }
  [[noreturn]] void refuse(i64 row, const std::string& why) const {
    throw Error(Errc::Corrupt, fmt::format("{}: {}", place(row), why));
  }
  // Refuses a row that asks for something that libds does not support.
  [[noreturn]] void refuse_row(i64 row, const std::string& why) const {
    throw Error(Errc::Unavailable, fmt::format("{}: {}", place(row), why));
  }
  [[noreturn]] void refuse_type(const std::string& why) const {
    throw Error(Errc::Unavailable, fmt::format("data file '{}': {}", path_, why));
  }
  i64 column(std::string_view name) const { return schema_->GetFieldIndex(std::string(name)); }

 private:
  void check(const arrow::Status& status) const {
    if (!status.ok()) refuse(fmt::format("is no {} file that can be read: {}", kind_, status.message()));
  }
  template <class T>
  T value(arrow::Result<T> result) const {
    check(result.status());
    return std::move(result).ValueUnsafe();
  }
  // The library throws where a file contradicts itself.
  template <class F>
  void guarded(F&& body) const {
    try {
      body();
    } catch (const Error&) {
      throw;
    } catch (const std::exception& e) {
      refuse(fmt::format("is no {} file that can be read: {}", kind_, e.what()));
    }
  }
  void open_parquet() {
    parquet::ReaderProperties properties(&pool_);
    parquet::arrow::FileReaderBuilder builder;
    check(builder.Open(value(arrow::io::ReadableFile::Open(path_, &pool_)), properties));
    parquet::ArrowReaderProperties reading(false);
    reading.set_batch_size(kBatchRows);
    reading.set_pre_buffer(false);  // by threads that know nothing of our end
    builder.memory_pool(&pool_)->properties(reading);
    check(builder.Build(&parquet_));
    check(parquet_->GetSchema(&schema_));
    take_columns(value(parquet_->GetRecordBatchReader()));
  }
  void take_columns(std::unique_ptr<arrow::RecordBatchReader> reader) {
    // Reads only known columns, so that the others are not decoded.
    std::vector<int> row_groups, columns;
    for (int g = 0; g < parquet_->num_row_groups(); ++g) row_groups.push_back(g);
    const parquet::SchemaDescriptor& leaves = *parquet_->parquet_reader()->metadata()->schema();
    for (int c = 0; c < leaves.num_columns(); ++c) {
      const std::string root = leaves.GetColumnRoot(c)->name();
      if (root == "text" || root == "prompt" || root == "completion" || root == "messages" ||
          meaning_in_record(root) != MemberMeaning::Other)
        columns.push_back(c);
    }
    batches_ = columns.empty() ? std::move(reader) : value(parquet_->GetRecordBatchReader(row_groups, columns));
    schema_ = batches_->schema();
    next_ = [this] { return batches_->Next(); };
  }
  // A file of Arrow's, or a stream, as `datasets` writes it.
  void open_arrow() {
    const auto input = value(arrow::io::ReadableFile::Open(path_, &pool_));
    arrow::ipc::IpcReadOptions options = arrow::ipc::IpcReadOptions::Defaults();
    options.memory_pool = &pool_;
    options.use_threads = false;
    const std::string magic = value(input->ReadAt(0, 6))->ToString();
    check(input->Seek(0));
    if (magic == "ARROW1") {
      auto file = value(arrow::ipc::RecordBatchFileReader::Open(input, options));
      schema_ = file->schema();
      next_ = [file, i = 0]() mutable -> arrow::Result<std::shared_ptr<arrow::RecordBatch> > {
        if (i == file->num_record_batches()) return std::shared_ptr<arrow::RecordBatch>();
        return file->ReadRecordBatch(i++);
      };
      return;
    }
    batches_ = value(arrow::ipc::RecordBatchStreamReader::Open(input, options));
    schema_ = batches_->schema();
    next_ = [this] { return batches_->Next(); };
  }

  std::string path_;
  std::string_view kind_;
  BoundedPool& pool_ = BoundedPool::instance();
  std::unique_ptr<parquet::arrow::FileReader> parquet_;
  std::shared_ptr<arrow::RecordBatchReader> batches_;
  std::shared_ptr<arrow::Schema> schema_;
  std::function<arrow::Result<std::shared_ptr<arrow::RecordBatch> >()> next_;
};

// Strings of a column, by row.
class Strings {
 public:
  // `what`: "its column "text"".
  Strings(const ArrowFile& file, const std::shared_ptr<arrow::Array>& array, std::string what)
      : file_(file), what_(std::move(what)) {
    small_ = dynamic_cast<const arrow::StringArray*>(array.get());
    large_ = dynamic_cast<const arrow::LargeStringArray*>(array.get());
    if (small_ == nullptr && large_ == nullptr)
      file.refuse_type(fmt::format("{} is of type {}; columns of strings are read", what_,
                                   array == nullptr ? "?" : array->type()->ToString()));
    array_ = array;
  }
  std::string_view at(i64 i, i64 row) const {
    if (array_->IsNull(i)) file_.refuse(row, fmt::format("{} is null, where a string belongs", what_));
    const std::string_view text = small_ != nullptr ? small_->GetView(i) : large_->GetView(i);
    if (std::ssize(text) > kMostRecordBytes)
      file_.refuse(row, fmt::format("{} is longer than {} MiB", what_, kMostRecordBytes >> 20));
    return text;
  }

 private:
  const ArrowFile& file_;
  std::string what_;
  std::shared_ptr<arrow::Array> array_;
  const arrow::StringArray* small_;
  const arrow::LargeStringArray* large_;
};

// Whether a value asks for nothing: null, false, or empty.
bool is_nothing(const arrow::Array& array, i64 i) {
  if (array.IsNull(i)) return true;
  switch (array.type_id()) {
    case arrow::Type::NA: return true;
    case arrow::Type::BOOL: return !static_cast<const arrow::BooleanArray&>(array).Value(i);
    case arrow::Type::STRING: return static_cast<const arrow::StringArray&>(array).GetView(i).empty();
    case arrow::Type::LARGE_STRING: return static_cast<const arrow::LargeStringArray&>(array).GetView(i).empty();
    case arrow::Type::LIST: return static_cast<const arrow::ListArray&>(array).value_length(i) == 0;
    case arrow::Type::LARGE_LIST: return static_cast<const arrow::LargeListArray&>(array).value_length(i) == 0;
    case arrow::Type::STRUCT: {
      const auto& fields = static_cast<const arrow::StructArray&>(array);
      for (int f = 0; f < fields.num_fields(); ++f)
        if (!is_nothing(*fields.field(f), i)) return false;
      return true;
    }
    default: return false;
  }
}

// Columns, or fields of a struct, that change what is trained on (records.h).
class WatchedColumns {
 public:
  void add(const std::string& name, MemberMeaning meaning, std::shared_ptr<arrow::Array> array) {
    if (meaning != MemberMeaning::Other) all_.push_back({name, meaning, std::move(array)});
  }
  // Whether row i is trained on; nothing if no column decides it. refuse(why) throws.
  template <class Refuse>
  std::optional<bool> is_trained(i64 i, Refuse&& refuse) const {
    std::optional<bool> result;
    for (const auto& [name, meaning, array] : all_) {
      if (meaning == MemberMeaning::Unsupported) {
        if (!is_nothing(*array, i)) refuse(fmt::format("its \"{}\" is not supported, and no part of the text", name));
        continue;
      }
      if (array->IsNull(i)) continue;
      const arrow::Result<std::shared_ptr<arrow::Scalar> > scalar = array->GetScalar(i);
      const auto number = scalar.ok() ? (*scalar)->CastTo(arrow::float64()) : scalar;
      if (!number.ok())
        refuse(fmt::format("its \"{}\" is of type {}, where a number belongs", name, array->type()->ToString()));
      const double value = static_cast<const arrow::DoubleScalar&>(**number).value;
      const std::optional<bool> is_trained = is_trained_on(meaning, value);
      if (!is_trained) refuse(fmt::format("its \"{}\" is {}; the weights 0 and 1 are supported", name, value));
      if (result.value_or(*is_trained) != *is_trained)
        refuse(fmt::format("its \"{}\" contradicts another one of its weights", name));
      result = is_trained;
    }
    return result;
  }

 private:
  struct Column {
    std::string name;
    MemberMeaning meaning;
    std::shared_ptr<arrow::Array> array;
  };
  std::vector<Column> all_;
};

// Lists of structs with a role and what is said.
class Messages {
 public:
  Messages(const ArrowFile& file, const std::shared_ptr<arrow::Array>& array) : file_(file) {
    if (const auto* small = dynamic_cast<const arrow::ListArray*>(array.get())) {
      offset_ = [small](i64 i) { return i64{small->value_offset(i)}; };
      values_ = std::dynamic_pointer_cast<arrow::StructArray>(small->values());
    } else if (const auto* large = dynamic_cast<const arrow::LargeListArray*>(array.get())) {
      offset_ = [large](i64 i) { return large->value_offset(i); };
      values_ = std::dynamic_pointer_cast<arrow::StructArray>(large->values());
    }
    if (values_ == nullptr)
      file.refuse_type(fmt::format("its column \"messages\" is of type {}; lists of structs are read",
                                   array == nullptr ? "?" : array->type()->ToString()));
    array_ = array;
    for (const auto& [name, strings] : {std::pair("role", &roles_), {"content", &contents_}}) {
      const std::shared_ptr<arrow::Array> column = values_->GetFieldByName(name);
      if (column == nullptr) file.refuse(fmt::format("the messages of its column \"messages\" have no \"{}\"", name));
      strings->emplace(file, column, fmt::format("\"{}\" of a message", name));
    }
    for (int f = 0; f < values_->num_fields(); ++f) {
      const std::string& name = values_->struct_type()->field(f)->name();
      beside_.add(name, meaning_in_message(name), values_->field(f));
    }
  }
  Record at(i64 i, i64 row, const ChatTemplate& chat) const {
    if (array_->IsNull(i)) file_.refuse(row, "its column \"messages\" is null, where a list belongs");
    Conversation conversation(chat);
    const i64 begin = offset_(i), end = offset_(i + 1);
    if (begin == end) file_.refuse(row, "its column \"messages\" is empty");
    for (i64 m = begin; m < end; ++m) {
      const auto refuse = [&](const std::string& why) {
        file_.refuse(row, fmt::format("message {}: {}", m - begin + 1, why));
      };
      if (values_->IsNull(m)) refuse("is null, where an object belongs");
      const std::optional<bool> is_trained = beside_.is_trained(
          m, [&](const std::string& why) { file_.refuse_row(row, fmt::format("message {}: {}", m - begin + 1, why)); });
      if (const std::string why = conversation.add(roles_->at(m, row), contents_->at(m, row), is_trained); !why.empty())
        refuse(why);
    }
    return conversation.take();
  }

 private:
  const ArrowFile& file_;
  std::shared_ptr<arrow::Array> array_;
  std::shared_ptr<arrow::StructArray> values_;
  std::function<i64(i64)> offset_;
  std::optional<Strings> roles_, contents_;
  WatchedColumns beside_;
};

}  // namespace

std::unique_ptr<TokenFile> open_arrow_file(const std::string& path, DataFormat format, const TextEncoding& encoding) {
  auto file = std::make_unique<TokenFile>();
  file->name = path;
  file->map(path);
  ArrowFile table(path, format);
  const auto has = [&](std::string_view name) { return table.column(name) >= 0; };
  RecordForm form = RecordForm::Text;
  if (!has("text")) {
    form = has("messages") ? RecordForm::Messages : RecordForm::Prompt;
    if (form == RecordForm::Prompt && !(has("prompt") && has("completion")))
      table.refuse("the table has no column \"text\", nor \"prompt\" and \"completion\", nor \"messages\"");
  }
  const ChatTemplate chat(encoding.chat_template);
  RecordIds ids(*file, encoding, form, fmt::format("{}, {} in a row", table.kind(), form_name(form)),
                [&table](i64 row) { return table.place(row); });
  i64 row = 0;
  while (const std::shared_ptr<arrow::RecordBatch> batch = table.next()) {
    const auto strings = [&](const std::string& name) {
      return Strings(table, batch->GetColumnByName(name), fmt::format("its column \"{}\"", name));
    };
    WatchedColumns beside;
    for (int c = 0; c < batch->num_columns(); ++c) {
      const MemberMeaning meaning = meaning_in_record(batch->column_name(c));
      if (form != RecordForm::Text || meaning != MemberMeaning::Unsupported)
        beside.add(batch->column_name(c), meaning, batch->column(c));
    }
    const auto add = [&](auto&& make) {
      for (i64 i = 0; i < batch->num_rows(); ++i) {
        ++row;
        Record record = make(i);
        if (!beside.is_trained(i, [&](const std::string& why) { table.refuse_row(row, why); }).value_or(true)) {
          if (form == RecordForm::Text) table.refuse_row(row, std::string(kTextIsTrainedOnWhole));
          record.leave_out();
        }
        ids.add(std::move(record), row);
      }
    };
    switch (form) {
      case RecordForm::Text: {
        const Strings text = strings("text");
        add([&](i64 i) { return Record::of_text(std::string(text.at(i, row))); });
        break;
      }
      case RecordForm::Prompt: {
        const Strings prompt = strings("prompt"), completion = strings("completion");
        add([&](i64 i) {
          return Record::of_prompt(std::string(prompt.at(i, row)), std::string(completion.at(i, row)));
        });
        break;
      }
      case RecordForm::Messages: {
        const Messages messages(table, batch->GetColumnByName("messages"));
        add([&](i64 i) { return messages.at(i, row, chat); });
        break;
      }
    }
  }
  if (row == 0) throw Error(Errc::Config, fmt::format("data file '{}' has no rows", path));
  ids.finish();
  return file;
}

#endif

}  // namespace ds
