#!/usr/bin/env bash
# How the heads that ship for smollm2-135m were made, on one H200.
# make_heads.sh OUT PROMPTS...: prompts in files as `outrider train --prompts` reads them; the heads go to OUT/heads.
# Those that ship learnt from the first 19,878,893 tokens of answers, for 800 s, and of EAGLE-3's 16,384 words the 256
# that the model writes least often were left out afterwards.
set -euo pipefail
out="$1"
shift
prompts=()
for file in "$@"; do prompts+=(--prompts "$file"); done
outrider train --answers-only --model smollm2-135m "${prompts[@]}" --out "$out/answers" \
    --tokens 19878893 --max-new 512 --self-prompts 0.35 --length 1024 --max-requests 2048 --seed 1
outrider train \
    eagle3:optimizer=muon,matrix_rate=4e-3 \
    dspark:markov_rank=32,draft_vocabulary=16384,anchors=256,optimizer=muon,matrix_rate=4e-3 \
    medusa:learning_rate=3e-3 \
    draft_model:draft_vocabulary=8192,copied=0/1/2,optimizer=muon,matrix_rate=4e-3 \
    --model smollm2-135m --answers "$out/answers" --out "$out/heads" --rows 24 --seconds 800
