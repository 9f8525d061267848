#!/usr/bin/env bash
# Everything that needs a GPU, from binaries that were built elsewhere. Evidence lands in OUT, one file a question; a table comes last.
#
# usage: [BIN=target/release] [OUT=probes/evidence/<gpu>] [LIMIT=540] [SLOTGRAPH_REQUIRE_GPU=1] tests/gpu/run.sh STAGE…
# stages: check-ops check-ops-shapes exactness lengths readiness bench bench-eager attribution long load sanitizer doctor serve soak (or: all), ep-shared and ep2 (ep.sh); a stage may name one model: exactness=tiny-llama3
# gates: serve and soak at once, for a tighter budget of time.
# BIN holds slotgraph-probe, which starts servers too (and slotgraph, for sanitizer). LIMIT: seconds that one probe may take.
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
  table+=$(grep -aE '^(BAD|FATAL|slotgraph-probe:|thread )|panicked|FAIL|BEYOND|NOT CAUGHT|skipped:|tok_s_|step_ms_.*_p50|copy_gb_s|upload|weights_|ceiling_share|stamped_step|oracle_' "$out/$name.txt" \
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
  local folder oracle mean margin
  for folder in $(chosen "$models"); do
    oracle=${folder#shakespeare-}
    # Small untrained routers are near ties: the CPU in contract precision flips over a margin of 1.11 there too.
    case $folder in
      shakespeare-dsv2) mean=0.025 margin=0.5 ;;
      shakespeare-qwen3) mean=0.020 margin=0.5 ;;
      tiny-dsv2-grouped) mean=0.1 margin=1.2 ;;
      *) mean=0.1 margin=0.5 ;;
    esac
    run "exactness-$folder" exactness "tests/models/$folder" --device cuda --kv-memory 2GiB \
      --oracle "tests/oracle/$oracle.json" --mean-limit $mean --margin-limit $margin
  done
}

# No length is baked in: to the end of the context, graph against eager (hand case A3).
lengths() {
  local name
  for name in $(chosen "$models"); do
    case $name in shakespeare-*) ;; *) continue ;; esac
    run "lengths-$name" exactness "tests/models/$name" --device cuda --kv-memory 2GiB --cases tests/cases/long.json \
      --leg graph --leg scored --leg "graph, bucket 8" --leg "graph, beside 7"
  done
  for name in $(chosen "$shapes"); do
    [ -d "tests/shapes/$name" ] || continue
    run "lengths-$name" exactness "tests/shapes/$name" --load-format dummy --device cuda --max-model-len 8192 --max-slots 8 \
      --cases tests/cases/long-8192.json --leg graph
  done
}

readiness() {
  local name
  for name in $(chosen "$models"); do
    [ -d "tests/models/$name" ] || continue
    run "readiness-$name" graph-readiness "tests/models/$name" --device cuda --kv-memory 2GiB --replays 10000
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

# A real checkpoint of a real shape, read twice: the second read comes from the page cache.
load() {
  local folder=${CHECKPOINT:-/tmp/slotgraph-qwen3-4b}
  [ -f "$folder/config.json" ] || "$probe" make-checkpoint tests/shapes/qwen3-4b "$folder" > "$out/make-checkpoint.log" 2>&1
  # Never read: a folder of files must have one.
  cp -n tests/models/shakespeare-qwen3/tokenizer.json "$folder/" 2> /dev/null
  run load-first bench-decode "$folder" --device cuda --max-model-len 1024 --rows 1 --steps 32 --repeats 1
  run load-second bench-decode "$folder" --device cuda --max-model-len 1024 --rows 1 --steps 32 --repeats 1 --min-load-share 0.6
}

# memcheck and racecheck on the smallest model, where the machine has the tool.
sanitizer() {
  local tool
  if ! command -v compute-sanitizer > /dev/null; then
    table+="skip          sanitizer: no compute-sanitizer on this machine"$'\n'
    return
  fi
  for tool in memcheck racecheck; do
    if compute-sanitizer --tool $tool --error-exitcode 9 "$bin/slotgraph" generate --model tests/models/tiny-dsv2-grouped \
      --device cuda --cuda-graph=off --buckets 1,4,16 --prompt-ids 1,2,3,4,5 --max-tokens 4 > "$out/$tool.log" 2>&1; then
      table+="pass          $tool"$'\n'
    else
      table+="FAIL          $tool: $(grep -aE 'ERROR SUMMARY|Error|error' "$out/$tool.log" | tail -n 1)"$'\n'
      failed=1
    fi
  done
}

doctor() { run doctor doctor; }

# start NAME ARGUMENTS…: as `run`, in the background; `finish` waits for all of them.
started=()
start() {
  (
    failed=0 table=''
    run "$@"
    printf '%s' "$table" > "$out/$1.table"
    exit $failed
  ) &
  started+=("$!=$1")
}
finish() {
  local one
  for one in "${started[@]}"; do
    wait "${one%%=*}" || failed=1
    table+=$(cat "$out/${one#*=}.table")$'\n'
    rm -f "$out/${one#*=}.table"
  done
  started=()
}

# The server's flags for the demo model and for a real shape, so that two servers of each fit into one GPU beside one another.
demo=(--device cuda --kv-memory 2GiB --prefill-chunk 64)
large=(tests/shapes/deepseek-v2-lite --load-format dummy --device cuda --max-model-len 2048 --kv-memory 9GiB --prefill-chunk 128)

start_reliability() {
  start reliability http-reliability -- "${demo[@]}"
  start reliability-deepseek-v2-lite http-reliability --timeout 120 -- "${large[@]}"
}

# Six minutes; the planted leak is one page every ten seconds, so that its soak is short.
start_soak() {
  kept=$(mktemp -d)
  local soak=(soak --duration 360 --bucket 20 --settle 60 --canary 16 --leak-every 10 --timeout 120 --max-drift 0.5)
  start soak "${soak[@]}" --keep "$kept/demo" -- "${demo[@]}"
  start soak-deepseek-v2-lite "${soak[@]}" --keep "$kept/large" -- "${large[@]}"
}

# Answers of both soaks: verified in one pass each, in a bucket that the soak never used, and some of them generated again.
start_replay() {
  local replay=(--limit 100 --regenerate 20)
  start replay replay "$kept/demo/traces.jsonl" --prompt-file "$kept/demo/prompts.jsonl" "${replay[@]}" \
    --device cuda --kv-memory 2GiB
  start replay-deepseek-v2-lite replay "$kept/large/traces.jsonl" --prompt-file "$kept/large/prompts.jsonl" \
    "${replay[@]}" "${large[@]}"
}

serve() {
  start_reliability
  finish
  run bench-http bench-http --concurrency 32 --num-requests 256 -- "${demo[@]}"
  run bench-http-deepseek-v2-lite bench-http --concurrency 32 --num-requests 256 -- "${large[@]}"
}

soak() {
  LIMIT=${SOAK_LIMIT:-480} start_soak
  finish
  start_replay
  finish
}

# Reliability and soak of both models at once: about 400 s.
gates() {
  LIMIT=${SOAK_LIMIT:-480} start_soak
  start_reliability
  finish
  start_replay
  finish
}

. tests/gpu/ep.sh
[ $# -gt 0 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
[ "$*" != all ] || set -- doctor check-ops check-ops-shapes exactness lengths readiness bench bench-eager attribution long load sanitizer serve soak
for stage in "$@"; do
  only=''
  [ "$stage" = "${stage#*=}" ] || only=${stage#*=}
  case ${stage%%=*} in
    check-ops | check-ops-shapes | exactness | lengths | readiness | bench | bench-eager | attribution | long | load | sanitizer | doctor | serve | soak | gates | ep-shared | ep2 | ep2-core | ep2-gates)
      name=${stage%%=*}
      "${name//-/_}"
      ;;
    *) echo "no stage $stage" >&2; exit 2 ;;
  esac
done
printf '%s' "$table" | grep -v '^ *$'
exit $failed
