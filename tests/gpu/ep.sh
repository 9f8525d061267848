# Stages for expert parallelism, read by run.sh: ep-shared needs one GPU, which two ranks share; ep2 needs two and is ep2-core (graphs, bits,
# speed) and ep2-gates (serving, failures, starts and stops).
# usage: run.sh ep-shared | run.sh ep2     EP_CYCLES: starts and stops of ep2-gates (default 100)

# Models with experts that the repository carries with their weights.
sparse='shakespeare-dsv2 tiny-dsv2-grouped'
ep_shared_flags=(--device cuda --ep 2 --devices 0,0 --allow-shared-device)
ep2_flags=(--device cuda --ep 2 --devices 0,1)

# verdict NAME OK REASON SECONDS: a line of the table for what no probe judges.
verdict() {
  number=$((number + 1))
  note "$([ "$2" = 1 ] && echo pass || echo FAIL)" "$4" "$1  $3"
}

# serve_until_exit NAME LIMIT FLAGS…: starts a server; once it is ready sends one request; waits for its exit, at most LIMIT seconds.
# Sets code (124: it had to be killed), took (seconds from the request, or from the start when it never was ready) and log.
serve_until_exit() {
  local name=$1 limit=$2 pid began=$SECONDS address='' asked=0
  shift 2
  log=$out/$name.log
  "$probe" serve --port 0 --served-model-name m "$@" > "$log" 2>&1 &
  pid=$!
  while kill -0 $pid 2> /dev/null && [ $((SECONDS - began)) -lt "$limit" ]; do
    if [ $asked = 0 ]; then
      address=$(grep -ao 'http://[0-9.]*:[0-9]*' "$log" | head -n 1)
      if [ -n "$address" ] && curl -sf -m 2 "$address/health" > /dev/null; then
        asked=1 began=$SECONDS
        curl -s -m "$limit" "$address/v1/completions" -H 'Content-Type: application/json' \
          -d '{"model": "m", "prompt": "ROMEO.", "max_tokens": 64, "ignore_eos": true}' > "$out/$name.answer" 2>&1 &
      fi
    fi
    sleep 0.2
  done
  took=$((SECONDS - began)) code=124
  if kill -0 $pid 2> /dev/null; then kill -9 $pid; wait $pid 2> /dev/null; else wait $pid; code=$?; fi
}

# fails NAME LIMIT PATTERN FLAGS…: the server must leave by itself with a code that is not 0, in time, and say PATTERN.
fails() {
  local name=$1 limit=$2 pattern=$3 code took log said ok=0
  shift 3
  serve_until_exit "$name" "$limit" "$@"
  said=$(grep -aE "$pattern" "$log" | head -n 1 | cut -c1-240)
  [ $code -ne 0 ] && [ $code -ne 124 ] && [ -n "$said" ] && ok=1
  [ -n "$said" ] || said="never said /$pattern/: $(tail -n 1 "$log" | cut -c1-240)"
  verdict "$name" $ok "exit $code; $said" "$took"
}

# stops NAME SIGNAL FLAGS…: one start, one answered request, one signal; the exit must be in order and within ten seconds.
stops() {
  local name=$1 signal=$2 pid began=$SECONDS address='' code=0 said=1
  shift 2
  "$probe" serve --port 0 --served-model-name m "$@" > "$out/$name.log" 2>&1 &
  pid=$!
  until address=$(grep -ao 'http://[0-9.]*:[0-9]*' "$out/$name.log" | head -n 1) && [ -n "$address" ] \
    && curl -sf -m 2 "$address/health" > /dev/null; do
    kill -0 $pid 2> /dev/null && [ $((SECONDS - began)) -lt 120 ] || { said=0; break; }
    sleep 0.1
  done
  if [ $said = 1 ]; then
    curl -sf -m 20 "$address/v1/completions" -H 'Content-Type: application/json' -d '{"model": "m", "prompt": "ROMEO.", "max_tokens": 8}' \
      > "$out/$name.answer" || said=0
  fi
  began=$SECONDS
  kill "-$signal" $pid 2> /dev/null
  while kill -0 $pid 2> /dev/null && [ $((SECONDS - began)) -lt 15 ]; do sleep 0.05; done
  took=$((SECONDS - began))
  if kill -0 $pid 2> /dev/null; then kill -9 $pid; code=124; fi
  wait $pid 2> /dev/null || [ $code = 124 ] || code=$?
  [ "$signal" = KILL ] && [ $code = 137 ] && code=0
  [ $said = 1 ] && [ $code = 0 ] && [ $took -le 10 ]
}

# What must not grow over starts and stops: processes on the GPUs, and files in shared memory.
left_behind() { { ls /dev/shm; nvidia-smi --query-compute-apps=pid --format=csv,noheader 2> /dev/null; } | sort; }

ep_failures() {
  local kind=$1 transport=$2
  shift 2
  fails "$kind-rank-panics-$transport" 30 'rank 1' "$@" --transport "$transport" --fault rank-panic@1
  fails "$kind-rank-stalls-$transport" 45 'rank 1|rank 0 waited|did not finish' "$@" --transport "$transport" --fault rank-stall@1
  fails "$kind-start-stalls-$transport" 60 'rank 1' "$@" --transport "$transport" --init-timeout 8 --fault start-stall@1
}

ep_shared() {
  local model transport
  local small=(--kv-memory 1GiB --max-slots 32 --prefill-chunk 512)
  for model in $sparse; do
    run "ep-readiness-p2p-shared-$model" graph-readiness "tests/models/$model" "${ep_shared_flags[@]}" "${small[@]}" --transport p2p --no-canary
  done
  for model in $sparse; do
    start "ep-exactness-shared-$model" exactness "tests/models/$model" --device cuda "${small[@]}" --allow-shared-device \
      --ep-legs 2 --ep-devices 0,0 --transport-legs host-staged,p2p \
      --leg 'ep 2, host-staged, eager' --leg 'ep 2, p2p, eager' --leg 'ep 2, p2p, graph'
  done
  finish
  run ep-attribution-shared attribution "${ep_shared_flags[@]}" "${small[@]}" --transport p2p --rows 1 --steps 16
  local serving=(tests/models/shakespeare-dsv2 "${ep_shared_flags[@]}" "${small[@]}")
  for transport in p2p host-staged; do
    stops_in_order "ep-shared-stops-$transport" TERM "${serving[@]}" --transport $transport
    ep_failures ep-shared $transport "${serving[@]}"
  done
  fails ep-shared-capture 60 'bucket 4' "${serving[@]}" --transport p2p --fault capture-fail@4
  fails ep-shared-nccl 20 'NCCL' "${serving[@]}" --transport nccl
}

# One start and stop; in order, or the last line of what it said.
stops_in_order() {
  if stops "$@"; then verdict "$1" 1 'answered and left in order' "$took"; else verdict "$1" 0 "$(tail -n 1 "$out/$1.log" | cut -c1-240)" "$took"; fi
}

ep2() { ep2_core && ep2_gates; }

ep2_core() {
  local model transport
  local shape=(tests/shapes/deepseek-v2-lite --load-format dummy --max-model-len 4096)
  local legs=(--leg 'ep 2, host-staged, eager')
  for transport in nccl p2p; do legs+=(--leg "ep 2, $transport, eager" --leg "ep 2, $transport, graph"); done
  run ep2-smoke graph-readiness tests/models/shakespeare-dsv2 "${ep2_flags[@]}" --kv-memory 1GiB --transport nccl --nccl-smoke only
  for transport in nccl p2p; do
    run "ep2-readiness-$transport-shakespeare-dsv2" graph-readiness tests/models/shakespeare-dsv2 "${ep2_flags[@]}" --kv-memory 2GiB --transport $transport --no-canary
    run "ep2-readiness-$transport-deepseek-v2-lite" graph-readiness "${shape[@]}" "${ep2_flags[@]}" --transport $transport --no-canary
  done
  for model in $sparse; do
    run "ep2-exactness-$model" exactness "tests/models/$model" --device cuda --kv-memory 1GiB --ep-legs 2 --ep-devices 0,1 \
      --transport-legs host-staged,nccl,p2p "${legs[@]}"
  done
  run ep2-bench-one-gpu bench-decode "${shape[@]}" --device cuda --rows 1,8,32,64,128 --context 64 --warmup 32 --steps 256 --repeats 2
  for transport in p2p nccl; do
    run "ep2-bench-$transport" bench-decode "${shape[@]}" "${ep2_flags[@]}" --transport $transport --rows 1,8,32,64,128 \
      --context 64 --warmup 32 --steps 256 --repeats 2
    run "ep2-attribution-$transport-b1" attribution "${shape[@]}" "${ep2_flags[@]}" --transport $transport --rows 1
    run "ep2-attribution-$transport-b32" attribution "${shape[@]}" "${ep2_flags[@]}" --transport $transport --rows 32
  done
}

ep2_gates() {
  local transport before after cycle bad=0 took=0 began
  local serving=(tests/models/shakespeare-dsv2 "${ep2_flags[@]}" --kv-memory 2GiB)
  run ep2-reliability http-reliability -- "${serving[@]}"
  run ep2-soak soak --duration 360 --bucket 20 --settle 60 -- "${serving[@]}"
  for transport in p2p nccl; do ep_failures ep2 $transport "${serving[@]}"; done
  # What around the process goes wrong is named; what only slows NCCL down is survived.
  NCCL_SOCKET_IFNAME=doesnotexist fails ep2-nccl-interface 60 'NCCL_SOCKET_IFNAME=doesnotexist' "${serving[@]}" --transport nccl
  NCCL_P2P_DISABLE=1 stops_in_order ep2-nccl-without-p2p TERM "${serving[@]}" --transport nccl
  CUDA_VISIBLE_DEVICES=0 fails ep2-one-visible 5 'CUDA_VISIBLE_DEVICES' "${serving[@]}" --transport nccl
  CUDA_VISIBLE_DEVICES=1,0 stops_in_order ep2-reordered TERM "${serving[@]}" --transport p2p
  fails ep2-three 5 '1, 2, 4 or 8' tests/models/shakespeare-dsv2 --device cuda --ep 3
  before=$(left_behind) began=$SECONDS
  for cycle in $(seq "${EP_CYCLES:-100}"); do
    stops ep2-cycle "$( ((cycle % 10)) && echo TERM || echo KILL)" "${serving[@]}" --max-slots 8 --transport "$( ((cycle % 2)) && echo p2p || echo nccl)" || bad=$((bad + 1))
  done
  after=$(left_behind)
  verdict ep2-cycles "$([ $bad = 0 ] && [ "$before" = "$after" ] && echo 1 || echo 0)" "$bad of ${EP_CYCLES:-100} went wrong; left behind: $(comm -13 <(echo "$before") <(echo "$after") | tr '\n' ' ')" $((SECONDS - began))
}
