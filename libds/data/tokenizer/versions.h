// SPDX-License-Identifier: Apache-2.0
#pragma once
// Version 5 of transformers beside version 4, which a definition follows: it reads a directory by another class, and
// makes the form of most classes anew, whatever tokenizer.json says.

#include "data/tokenizer/classes.h"
#include "data/tokenizer/directory.h"
#include "data/tokenizer/pipeline.h"
#include "data/tokenizer/token_files.h"

namespace ds::tokenizer {

// The "normalizer", "pre_tokenizer" and "decoder" of a tokenizer.json.
Json form_of_file(const Json& file);
// The "type" of a part; empty if it has none.
std::string part_type_of(const Json& part);

// The row of the class by which transformers 5 reads the vocabulary. is_byte_level: by a tokenizer.json.
const ClassRow& row_of_five(const Directory& directory, const ClassName& name, bool is_byte_level);

// The inputs from which a definition was made.
struct Origin {
  const Directory& directory;
  const ClassName& name;
  const ClassRow& row;  // as transformers 4 takes it
  const TextFormOptions& options;
  const TokenFiles& files;
  const Json &own_form, &own_tokens;  // of tokenizer.json: form_of_file() and its added tokens
};

// Adds a warning for each difference that ids may show.
void warn_of_five(const Origin& origin, Definition& made);

// Throw Errc::Unavailable where the versions differ, and a warning would not do: transformers 4 finds normalized tokens
// as tokenizer.json normalizes them (own_part: its normalizer, where the class changes it), and 5 as the class does;
// and 5 alone adds tokens of other names, such as image_token.
void check_normalized(const Directory& directory, const Json& own_part, const Definition& made, const AddedList& list);
void refuse_other_names(const Directory& directory, Shape shape, const AddedList& list, const Adding& adding);

}  // namespace ds::tokenizer
