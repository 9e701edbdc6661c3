// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parts of a run: run.cc opens it, training.cc trains and evaluates, generate.cc writes text.

#include <memory>
#include <optional>

#include "base/as_error.h"
#include "base/trace.h"
#include "ds/train.h"
#include "run/draft.h"
#include "run/journal.h"
#include "run/plans.h"
#include "run/request.h"
#include "run/run_data.h"
#include "run/run_record.h"
#include "run/saver.h"
#include "run/start.h"
#include "run/trained.h"

namespace ds {

struct TrainingRun::State {
  run::Request request;
  MemoryLedger ledger;
  std::unique_ptr<Trace> trace;    // of the first steps, if it is asked for; outlives what adds to it
  std::unique_ptr<Device> device;  // outlives what has memory of it
  std::unique_ptr<Mesh> mesh;
  run::Journal journal;
  run::RunData data;
  run::Start start;
  run::Trained trained;
  std::unique_ptr<run::Draft> draft;  // of inference; null: none
  std::unique_ptr<run::Saver> saver;
  std::unique_ptr<run::RunRecord> record;

  engine::Engine& engine() const noexcept { return *trained.engine; }

  // An error of one rank must not leave the others waiting.
  template <class F>
  auto collective(F&& body) {
    try {
      return body();
    } catch (const std::exception& e) {
      if (mesh) mesh->abort(as_error(e));
      throw;
    }
  }

  void open();
  void take_directory();
  // Nothing if any rank asks to stop.
  std::optional<double> evaluate(const std::function<int()>& stop_signal);
  // The largest of all ranks' numbers. On the way a pending save goes on, when no rank is busy with its part of it.
  i64 agree(i64 mine);
};

}  // namespace ds
