# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed checkpoint of GPT-2 of width 1600, and what DeepSpeed's own script makes of it.

zero_checkpoint.py make DIR LAYERS      4 ranks over gloo at ZeRO stage 2, bf16 with fp32 masters and Adam's moments, saved
                                        after one step; needs some 20 bytes of memory per parameter and rank
zero_checkpoint.py convert DIR OUT      zero_to_fp32 into the directory OUT, as its command line does with
                                        --safe_serialization
zero_checkpoint.py compare OUT FILE     exits with an error unless FILE holds the tensors of OUT, bit for bit
"""

import glob
import os
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["DS_ACCELERATOR"] = "cpu"

RANKS, WIDTH = 4, 1600


def model(torch, layers):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
            self.c_attn, self.c_proj = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
            self.c_fc, self.mlp_proj = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = torch.nn.Embedding(50257, WIDTH), torch.nn.Embedding(1024, WIDTH)
            self.h = torch.nn.ModuleList([Block() for _ in range(layers)])
            self.ln_f = torch.nn.LayerNorm(WIDTH)

        def forward(self):  # every parameter gets a gradient, and no activations are needed for that
            return sum(p.flatten()[:: max(1, p.numel() // 64)].float().square().sum() for p in self.parameters())

    return Model()


def rank_main(rank, directory, layers):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_SIZE=str(RANKS),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="29417")
    import deepspeed
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)
    deepspeed.init_distributed(dist_backend="gloo")
    net = model(torch, layers)
    torch.set_default_dtype(torch.float32)
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters()), config={
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": 2}})
    engine.backward(engine())
    engine.step()
    engine.save_checkpoint(directory)
    torch.distributed.destroy_process_group()


def tensors(paths):
    from safetensors import safe_open
    found = {}
    for path in paths:
        f = safe_open(path, "pt")
        found |= {name: (f, name) for name in f.keys()}
    return found


def main(command, *arguments):
    if command == "make":
        import multiprocessing
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=rank_main, args=(r, arguments[0], int(arguments[1]))) for r in range(RANKS)]
        for r in ranks:
            r.start()
        for r in ranks:
            r.join()
        sys.exit(any(r.exitcode for r in ranks))
    if command == "convert":
        from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
        convert_zero_checkpoint_to_fp32_state_dict(arguments[0], arguments[1], safe_serialization=True)
        fds = [os.open(f, os.O_RDONLY) for f in glob.glob(arguments[1] + "/*")]
        for fd in fds:
            os.fsync(fd)
    if command == "compare":
        import torch
        theirs, ours = tensors(glob.glob(arguments[0] + "/*.safetensors")), tensors([arguments[1]])
        assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()
        for name in theirs:
            a, b = (f.get_tensor(n) for f, n in (theirs[name], ours[name]))
            assert a.dtype == b.dtype and torch.equal(a, b), name


if __name__ == "__main__":
    main(*sys.argv[1:])
