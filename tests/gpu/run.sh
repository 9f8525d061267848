#!/usr/bin/env bash
# Everything that needs a GPU, from binaries that were built elsewhere. Evidence lands in OUT, one file a question; a table comes last.
#
# usage: [BIN=target/release] [OUT=probes/evidence/<gpu>] [LIMIT=540] [SLOTGRAPH_REQUIRE_GPU=1] tests/gpu/run.sh STAGE…
# stages: check-ops exactness readiness bench attribution long doctor serve soak (or: all); a stage may name one model: exactness=tiny-llama3
# BIN holds slotgraph-probe (and slotgraph, for serve and soak). LIMIT: seconds that one probe may take.
# Exit 0 if every probe passed, 1 if one failed, 3 if there is no GPU.
set -uo pipefail
cd "$(dirname "$0")/../.."
bin=${BIN:-target/release}
probe=$bin/slotgraph-probe
if ! ls /proc/driver/nvidia/gpus/*/information > /dev/null 2>&1 && ! ls /dev/nvidia[0-9]* > /dev/null 2>&1; then
  echo "no NVIDIA GPU on this machine" >&2
  [ "${SLOTGRAPH_REQUIRE_GPU:-0}" = 1 ] && exit 1
  exit 3
fi
gpu=$(sed -n 's/^Model: *//p' /proc/driver/nvidia/gpus/*/information 2> /dev/null | head -n 1 | awk '{print tolower($NF)}')
out=${OUT:-probes/evidence/${gpu:-gpu}}
mkdir -p "$out"
failed=0
table=''

# run NAME ARGUMENTS…: one probe; its evidence in $out/NAME.json, what it says in $out/NAME.txt.
run() {
  local name=$1 began=$SECONDS code word
  shift
  timeout -k 10 "${LIMIT:-540}" "$probe" --out "$out/$name.json" "$@" > "$out/$name.log" 2> "$out/$name.txt"
  code=$?
  [ -s "$out/$name.log" ] || rm -f "$out/$name.log"
  case $code in 0) word=pass ;; 3) word=skip ;; 124 | 137) word=late ;; *) word=FAIL ;; esac
  [ $code -eq 0 ] || failed=1
  table+=$(printf '%-4s %4d s  %s' "$word" $((SECONDS - began)) "$name")$'\n'
  # The lines that say why, or how fast.
  table+=$(grep -aE '^(BAD|FATAL|slotgraph-probe:|thread )|panicked|FAIL|BEYOND|NOT CAUGHT|skipped:|tok_s_|step_ms_.*_p50|copy_gb_s|ceiling_share|stamped_step|oracle_' "$out/$name.txt" \
    | cut -c1-420 | head -n "${LINES_EACH:-14}" | sed 's/^ */       /')$'\n'
}

# models STAGE: the trained and tiny models, or the one that the stage names.
models='shakespeare-dsv2 shakespeare-qwen3 tiny-llama3 tiny-dsv2-grouped tiny-qwen3-untied'
shapes='deepseek-v2-lite qwen3-4b'
chosen() { if [ -n "$only" ]; then echo "$only"; else echo "$1"; fi; }

check_ops() {
  local folder arguments=()
  for folder in $(chosen "$models"); do arguments+=(--model "tests/models/$folder"); done
  LINES_EACH=60 run check-ops exactness --check-ops --device cuda --keep-going "${arguments[@]}"
}

# The real shapes' first layers: one dense and two sparse, or two dense.
check_ops_shapes() {
  local shape
  for shape in $(chosen "$shapes"); do
    run "check-ops-$shape" exactness --check-ops --device cuda --keep-going --model "tests/shapes/$shape" \
      --load-format dummy --layers 3 --max-model-len 1024 --bucket 1,8,32,128
  done
}

exactness() {
  local folder oracle mean
  for folder in $(chosen "$models"); do
    oracle=${folder#shakespeare-}
    case $folder in shakespeare-dsv2) mean=0.025 ;; shakespeare-qwen3) mean=0.020 ;; *) mean=0.1 ;; esac
    run "exactness-$folder" exactness "tests/models/$folder" --device cuda --kv-memory 2GiB \
      --oracle "tests/oracle/$oracle.json" --mean-limit $mean
  done
}

readiness() {
  local name
  for name in $(chosen "$models"); do
    [ -d "tests/models/$name" ] || continue
    run "readiness-$name" graph-readiness "tests/models/$name" --device cuda --kv-memory 2GiB
  done
  for name in $(chosen "$shapes"); do
    [ -d "tests/shapes/$name" ] || continue
    run "readiness-$name" graph-readiness "tests/shapes/$name" --load-format dummy --device cuda --max-model-len 8192 --no-canary
  done
}

bench() {
  local shape
  for shape in $(chosen "$shapes"); do
    run "bench-decode-$shape" bench-decode "tests/shapes/$shape" --load-format dummy --device cuda --max-model-len 4096 \
      --rows 1,8,32,64,128 --context 64 --warmup 32 --steps 256
  done
}

bench_eager() {
  local shape
  for shape in $(chosen "$shapes"); do
    run "bench-decode-eager-$shape" bench-decode "tests/shapes/$shape" --load-format dummy --device cuda --max-model-len 4096 \
      --cuda-graph=off --rows 1,32 --context 64 --repeats 1
  done
}

attribution() {
  local shape rows
  for shape in $(chosen "$shapes"); do
    for rows in 1 32 128; do
      run "attribution-b$rows-$shape" attribution "tests/shapes/$shape" --load-format dummy --device cuda --max-model-len 4096 --rows $rows
    done
  done
}

long() {
  local shape
  for shape in $(chosen "$shapes"); do
    run "bench-decode-long-$shape" bench-decode "tests/shapes/$shape" --load-format dummy --device cuda --max-model-len 8192 \
      --rows 1,32 --context 4000,7900 --steps 192 --repeats 2
  done
}

doctor() { run doctor doctor; }

serve() {
  run reliability http-reliability -- --device cuda
  run bench-http bench-http --concurrency 32 --num-requests 256 -- --device cuda
  run bench-http-deepseek-v2-lite bench-http --concurrency 32 --num-requests 256 -- \
    tests/shapes/deepseek-v2-lite --load-format dummy --device cuda --max-model-len 8192
}

soak() {
  run soak soak --duration 360 --bucket 20 --settle 60 --keep "$out/soak-answers" -- --device cuda
  run replay replay "$out/soak-answers/traces.jsonl" --prompt-file "$out/soak-answers/prompts.jsonl" --limit 100 --regenerate 20 --device cuda
}

[ $# -gt 0 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2; }
[ "$*" != all ] || set -- doctor check-ops check-ops-shapes exactness readiness bench bench-eager attribution long serve soak
for stage in "$@"; do
  only=''
  [ "$stage" = "${stage#*=}" ] || only=${stage#*=}
  case ${stage%%=*} in
    check-ops | check-ops-shapes | exactness | readiness | bench | bench-eager | attribution | long | doctor | serve | soak)
      name=${stage%%=*}
      "${name//-/_}"
      ;;
    *) echo "no stage $stage" >&2; exit 2 ;;
  esac
done
printf '%s' "$table" | grep -v '^ *$'
exit $failed
