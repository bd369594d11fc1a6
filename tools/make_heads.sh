#!/usr/bin/env bash
# How the heads that ship for smollm2-135m were made, on one H200.
# make_heads.sh OUT FOREIGN PROMPTS...: prompts in files as `outrider train --prompts` reads them; below FOREIGN/LANGUAGE
# are texts in that language (docs/log.md says which). The heads go to OUT/heads, the draft model to OUT/draft.
# Those that ship began each part with the heads of the one before from their files in 8 bits, not from the state, with a
# Medusa of three blocks that a run of its own had made after the first, and the third part learnt from the first answers
# and its own alone, since the second ones had been lost. The fourth began with the heads in five bits, as they shipped, and
# learnt from its own answers alone, for which two processes had a half of the prompts each. All answers are cut where the
# time was over.
set -euo pipefail
out="$1"
foreign="$2"
shift 2
model=smollm2-135m
here="$(dirname "$0")"
prompts=()
for file in "$@"; do prompts+=(--prompts "$file"); done

# Long answers to learn from first, then more beginnings of answers, a part of them to prompts with long texts in them.
outrider train --answers-only --model $model "${prompts[@]}" --out "$out/first" \
    --tokens 19878893 --max-new 512 --self-prompts 0.35 --length 1024 --max-requests 2048 --seed 1
python "$here/make_prompts.py" $model "$out/first" "$out/long.jsonl" --count 14000
outrider train --answers-only --model $model "${prompts[@]}" --prompts "$out/long.jsonl" --out "$out/second" \
    --tokens 9276050 --max-new 192 --self-prompts 0.35 --length 2048 --max-requests 2048 --seed 2
python "$here/join_answers.py" "$out/all" "$out/first" "$out/second"

draft=draft_model:draft_vocabulary=8192,copied=0/1/2
block=dspark:markov_rank=32,draft_vocabulary=16384,anchors=256
fast=optimizer=muon,matrix_rate=4e-3
outrider train "eagle3:$fast" "$block,$fast" medusa:learning_rate=3e-3 "$draft,$fast" \
    --model $model --answers "$out/first" --out "$out/begun" --rows 24 --seconds 800

# The same heads, deeper where that paid, on the beginnings of all answers.
slower=optimizer=muon,matrix_rate=2.5e-3,learning_rate=6e-4
outrider train "eagle3:layers=3,length=6,$slower" "$block,$slower" medusa:blocks=5,learning_rate=1.5e-3 "$draft,$slower" \
    --model $model --answers "$out/all" --begin "$out/begun/state.pt" --out "$out/draft" \
    --rows 24 --seconds 830 --answer-length 192 --storage q5_1

# Once more without the draft model, with answers to requests for a translation, which are mostly copies.
python "$here/make_translations.py" "$out/translate.jsonl" German:15000:"$foreign/German" French:2500:"$foreign/French" \
    Spanish:2500:"$foreign/Spanish" Italian:2000:"$foreign/Italian" Portuguese:1000:"$foreign/Portuguese"
outrider train --answers-only --model $model "${prompts[@]}" --prompts "$out/long.jsonl" --prompts "$out/translate.jsonl" \
    --out "$out/third" --tokens 3208944 --max-new 192 --self-prompts 0.25 --length 2048 --max-requests 2048 --seed 3
python "$here/join_answers.py" "$out/last" "$out/first" "$out/third"
slow=optimizer=muon,matrix_rate=2e-3,learning_rate=5e-4
outrider train "eagle3:layers=4,length=6,$slow" "$block,$slow" medusa:blocks=6,learning_rate=1.2e-3 \
    --model $model --answers "$out/last" --begin "$out/draft/state.pt" --out "$out/third_heads" \
    --rows 24 --seconds 390 --answer-length 192 --storage q5_1

# The same heads on answers most of which are greedy, as most texts are asked for and as the figures are measured.
outrider train --answers-only --model $model "${prompts[@]}" --out "$out/fourth" \
    --tokens 9800000 --max-new 160 --self-prompts 0.2 --greedy 0.75 --seed 21
outrider train --answers-only --model $model --prompts "$out/translate.jsonl" --out "$out/fourth_foreign" \
    --tokens 1700000 --max-new 128 --greedy 0.85 --seed 23
python "$here/make_prompts.py" $model "$out/fourth" "$out/fourth_long.jsonl" --count 5000
outrider train --answers-only --model $model --prompts "$out/fourth_long.jsonl" --out "$out/fourth_passages" \
    --tokens 800000 --max-new 160 --greedy 0.75 --seed 24
python "$here/join_answers.py" "$out/greedy" "$out/fourth" "$out/fourth_foreign" "$out/fourth_passages"
outrider train "eagle3:layers=4,length=6,$slow" "$block,$slow" medusa:blocks=6,learning_rate=1.2e-3 \
    --model $model --answers "$out/greedy" --begin "$out/third_heads" --out "$out/heads" \
    --rows 24 --seconds 850 --answer-length 160 --storage q5_1
