"""The faults that `python -m tests.mutations` plants, each with the test that must catch it."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = {
    "remembered: the state of torch is not asked": Mutation(
        "fusion_backend/remembered.py",
        "options.measure_s, state_of_torch(), settings",
        "options.measure_s, settings",
        "tests/test_remembered.py",
    ),
    "remembered: measured answers are not asked again": Mutation(
        "fusion_backend/remembered.py",
        "return all(named(known_answer(k, options)) == then for k, then in",
        "return True or all(named(known_answer(k, options)) == then for k, then in",
        "tests/test_remembered_answers.py",
    ),
    "remembered: a graph is kept while something is left to measure": Mutation(
        "fusion_backend/remembered.py",
        "if file is None or failed or not judge.settled:",
        "if file is None or failed:",
        "tests/test_remembered_answers.py",
    ),
    "remembered: memory that arguments share is not asked": Mutation(
        "fusion_backend/cache/graph_text.py",
        "place = self.storages.setdefault(storage_id(t), len(self.storages))",
        "place = 0",
        "tests/test_remembered.py",
    ),
    "remembered: one place that was met before is like another": Mutation(
        "fusion_backend/cache/graph_text.py",
        'return f"known {self.places[value]}"',
        'return "known"',
        "tests/test_remembered.py",
    ),
    "remembered: an operator is known by its name alone": Mutation(
        "fusion_backend/cache/graph_text.py",
        'declared = "" if namespace_of(value) in TORCHS else schemas_of(value)',
        'declared = ""',
        "tests/test_remembered.py",
    ),
    "remembered: the marks of what backward computes again are lost": Mutation(
        "fusion_backend/rewrite/recipe.py",
        "            n.meta |= MARK\n",
        "            pass\n",
        "tests/test_remembered.py",
    ),
    "regions: a gradient is compared where a replacement may not have it": Mutation(
        "fusion_backend/measure/contest.py",
        "            gradients = passed_on(self.cut, self.inputs, gradients)\n",
        "            pass\n",
        "tests/test_measured_regions.py",
    ),
    "regions: what is wrong in its place may be taken on a bound": Mutation(
        "fusion_backend/measure/measuring.py",
        "if not won and (why := self.wrong or self.broken):",
        "if False and (why := self.wrong or self.broken):",
        "tests/test_measured_gate.py",
    ),
    "products: the second half of a tile is stored over the first": Mutation(
        "fusion_backend/kernels/gemm/linear.py",
        "second, second_up, top, left + STORED, m,",
        "second, second_up, top, left, m,",
        "tests/test_linear_kernels.py",
    ),
    "products: a shorter last group of tiles is as high as the others": Mutation(
        "fusion_backend/kernels/gemm/main_loop.py",
        "    height = min(down - group * GROUP, GROUP)\n",
        "    height = GROUP\n",
        "tests/test_linear_kernels.py",
    ),
    "products: few rows leave out the last share of a weight": Mutation(
        "fusion_backend/kernels/gemm/decode.py",
        "for share in tl.static_range(SHARES):",
        "for share in tl.static_range(SHARES - 1):",
        "tests/test_linear_kernels.py",
    ),
    "products: the slope of a hidden layer is not applied": Mutation(
        "fusion_backend/kernels/gemm/hidden_gradient.py",
        "    dh *= slope(pre.load([top, left]).to(tl.float32), ACT, KIND, INTERPRETED)\n",
        "",
        "tests/test_linear_kernels.py",
    ),
    "products: a weight that begins in the middle of 16 bytes is taken": Mutation(
        "fusion_backend/kernels/gemm/operands.py",
        "return statically_known_true(t.storage_offset() * t.element_size() % ALIGNED == 0)",
        "return True",
        "tests/test_linear_kernels.py",
    ),
    "products: under autocast the hidden layer is not cast": Mutation(
        "patterns/mlp.py",
        "y = h.to(w2.dtype) @ w2",
        "y = h @ w2",
        "tests/test_linear_kernels.py",
    ),
    "operator: what a kernel saved is a constant in a second derivative": Mutation(
        "fusion_backend/ops/operator.py",
        "if torch.is_grad_enabled() and (op.saves or not op.backward_plain):",
        "if False:",
        "tests/test_linear_kernels.py",
    ),
    "matcher: what a result is rounded to must stand in the graph as well": Mutation(
        "fusion_backend/match/templates.py",
        "return tuple(map(peel, roots)), size",
        "return roots, size",
        "tests/test_products_on_cuda.py",
    ),
    "judge: what a larger site covers is not raced against it": Mutation(
        "fusion_backend/measure/measuring.py",
        "            for rival in rivals(gate, sites):\n",
        "            for rival in ():\n",
        "tests/test_measured_rivals.py",
    ),
    "judge: an activation between products that lost is not tried": Mutation(
        "fusion_backend/measure/lost.py",
        'weighs = any("softmax" in name_of(n) for n in own)',
        "weighs = True",
        "tests/test_measured_rivals.py",
    ),
    "bound: a product inside a site counts as gained": Mutation(
        "fusion_backend/measure/bound.py",
        "    ours += half * attention + other / LIBRARY\n",
        "    ours += half * attention\n",
        "tests/test_regions.py",
    ),
    "matcher: the dtype of the result is not compared": Mutation(
        "fusion_backend/match/outcomes.py",
        "            if dtype != want.dtype:\n",
        "            if False:\n",
        "tests/test_rewrite.py",
    ),
    "matcher: the shape of the result is not compared": Mutation(
        "fusion_backend/match/outcomes.py",
        "            if device != want.device or not same(",
        "            if device != want.device and not same(",
        "tests/test_reasons.py",
    ),
    "fingerprint: what a function closes over is left out": Mutation(
        "fusion_backend/cache/fingerprint.py",
        "dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))",
        "{}",
        "tests/test_fingerprint.py",
    ),
    "guards: a question about sizes may add one": Mutation(
        "fusion_backend/compat/torch.py",
        "    env._check_frozen, env.evaluate_expr, env.fake_tensor_cache = refuse, assume, "
        "dict(results)\n",
        "    env._check_frozen, env.evaluate_expr = env._check_frozen, env.evaluate_expr\n",
        "tests/test_guards.py",
    ),
    "fills: what is written to a part has changed meanwhile": Mutation(
        "fusion_backend/capture/filled.py",
        "            if n < last and (n not in fills or found & held):\n",
        "            if False:\n",
        "tests/test_filled.py",
    ),
    "fills: some elements are not written": Mutation(
        "fusion_backend/capture/filled.py",
        "    one_by_one = starts[0] == 0 and stops == (*starts[1:], size) and {*steps} == {1}\n",
        "    one_by_one = {*steps} == {1}\n",
        "tests/test_filled.py",
    ),
    "views: two orders of a value are one": Mutation(
        "fusion_backend/ir/argument_views.py",
        "(a.op, a.attr, a.args) == (b.op, b.attr, b.args)",
        "(a.op, a.args) == (b.op, b.args)",
        "tests/test_norm_rotary.py",
    ),
    "unify: an argument may be two different values": Mutation(
        "fusion_backend/match/unify.py",
        "not one_value(graph_value(peel(before)), graph_value(peel(now))) or ("
        "\n            had.pinned and pinned and not one_value(before, now)\n        )",
        "False",
        "tests/test_canonical.py tests/graphs",
    ),
    "unify: one operator may stand for two of the pattern": Mutation(
        "fusion_backend/match/unify.py",
        "        if env.get(g, p) is not p:",
        "        if False:",
        "tests/test_canonical.py tests/graphs",
    ),
    "unify: every reciprocal counts as exact": Mutation(
        "fusion_backend/match/unify.py",
        "or not (self.reciprocal or abs(math.frexp(c.attr)[0]) == 0.5)",
        "or False",
        "tests/graphs",
    ),
    "gate: a value inside may be used elsewhere": Mutation(
        "fusion_backend/decide/legality.py",
        "                if u not in inside:\n",
        "                if False:\n",
        "tests/graphs",
    ),
    "gate: what a cast inside passes on is not used elsewhere": Mutation(
        "fusion_backend/decide/legality.py",
        "elif self.canon.of[u].op in COST_NOTHING and",
        "elif False and",
        "tests/test_casts_between_sites.py",
    ),
    "gate: a result need not be written to memory that others read": Mutation(
        "fusion_backend/decide/legality.py",
        "for m in (m for m in sorted(inside) if is_mutation(m)):",
        "for m in (m for m in match.interior if is_mutation(m)):",
        "tests/test_in_place_results.py",
    ),
    "gate: a site may read what another one computes inside": Mutation(
        "fusion_backend/decide/claims.py",
        "            if n in self.inside:\n",
        "            if False:\n",
        "tests/test_casts_between_sites.py",
    ),
    "gate: a site may compute inside what another one reads": Mutation(
        "fusion_backend/decide/claims.py",
        "            if n in self.read and n not in match.roots:\n",
        "            if False:\n",
        "tests/test_casts_between_sites.py",
    ),
    "matcher: a site may start at a copy of its result": Mutation(
        "fusion_backend/match/matcher.py",
        "if any(distance == 0 or memory.isdisjoint(storages(a)) for a in equal):",
        "if any(distance == 0 for a in equal):",
        "tests/test_names_of_values.py",
    ),
    "matcher: a site may start where its result is cast back": Mutation(
        "fusion_backend/match/matcher.py",
        "            again = again or unwidened(e) is not e  #",
        "            #",
        "tests/test_casts_between_sites.py",
    ),
    "matcher: an argument is always read before its roundings": Mutation(
        "fusion_backend/match/arguments.py",
        "    return (unwidened, peel, unchanged) if rounded else (peel, unchanged)\n",
        "    return (peel, unchanged)\n",
        "tests/test_casts_between_sites.py",
    ),
    "writer: the first of several names is lost": Mutation(
        "fusion_backend/rewrite/writer.py",
        "            dynamo |= dict.fromkeys(missing.pop(n, ()), atens[n])\n",
        "            pass\n",
        "tests/test_names_of_values.py",
    ),
    "writer: a copy inside becomes the result": Mutation(
        "fusion_backend/rewrite/writer.py",
        "if self.canon.of[n] is self.canon.of[root] and shared:",
        "if self.canon.of[n] is self.canon.of[root]:",
        "tests/test_names_of_values.py",
    ),
    "canonical: a write changes nothing for later readers": Mutation(
        "fusion_backend/ir/canonicalize.py",
        "            for a, (version, again) in versions.read.get(n, {}).items():\n",
        "            for a, (version, again) in ():\n",
        "tests/test_in_place_results.py",
    ),
    "canonical: what is written to later equals what is not": Mutation(
        "fusion_backend/ir/canonicalize.py",
        "            if e.nodes and version != later.get(e):\n",
        "            if False:\n",
        "tests/test_in_place_results.py",
    ),
    "canonical: a copy without grad mode passes gradients on": Mutation(
        "fusion_backend/ir/canonicalize.py",
        "            if e.nodes and self.stops_gradient(e.nodes[0], n, region):\n",
        "            if False:\n",
        "tests/test_values_without_gradient.py",
    ),
    "capture: a view without grad mode has the gradient of its base": Mutation(
        "fusion_backend/capture/view.py",
        "        if not self.region.get(n, (True,))[0] and not is_mutation(n):\n",
        "        if False:\n",
        "tests/test_values_without_gradient.py",
    ),
    "capture: a checkpoint returns new memory": Mutation(
        "fusion_backend/capture/functionalize.py",
        "any(u < last and n in returned(u, view) for u in n.users)",
        "False",
        "tests/test_in_place_results.py",
    ),
    "capture: a write to what a checkpoint returned is a write to nothing else": Mutation(
        "fusion_backend/capture/aliases.py",
        "                for s in (same | results) - group:\n",
        "                for s in ():\n",
        "tests/test_in_place_results.py",
    ),
    "canonical: flags of gradients tell values of one grad mode apart": Mutation(
        "fusion_backend/ir/canonicalize.py",
        "return modes[0] != modes[1] and self.trains(a) != self.trains(b)",
        "return self.trains(a) != self.trains(b)",
        "tests/test_values_without_gradient.py",
    ),
    "gate: views of arguments are hidden inside a site": Mutation(
        "fusion_backend/decide/claims.py",
        "            costs = self.legality.canon.of[n].op not in COST_NOTHING\n",
        "            costs = True\n",
        "tests/test_casts_between_sites.py",
    ),
    "gate: what chunk returns costs something": Mutation(
        "fusion_backend/decide/legality.py",
        'COST_NOTHING = {*FREE, "tuple"}',
        "COST_NOTHING = FREE",
        "tests/test_casts_between_sites.py",
    ),
    "capture: sizes are gone with the call that first read them": Mutation(
        "fusion_backend/capture/interpreter.py",
        "            kept = sizes_of_others(gone)\n",
        "            kept = set()\n",
        "tests/test_capture.py",
    ),
    "gate: a product that Inductor is to pipeline is taken": Mutation(
        "fusion_backend/decide/inductor_asks.py",
        'return pipelined(match) if pipelines_collectives() else ""',
        'return ""',
        "tests/ranks/test_async_tensor_parallel.py::test_the_reason_names_the_collective",
    ),
    "gate: an argument may be changed in between": Mutation(
        "fusion_backend/decide/legality.py",
        "                if begin < self.order[m] < last_root:\n",
        "                if False:\n",
        "tests/test_rewrite.py",
    ),
    "gate: what backward reads may be changed afterwards": Mutation(
        "fusion_backend/decide/legality.py",
        "                if later and kept and self.facts.training(match):\n",
        "                if False:\n",
        "tests/test_rewrite.py tests/test_backend.py",
    ),
    "gate: a match may cross a change of grad mode": Mutation(
        "fusion_backend/decide/legality.py",
        "        return len(whole) > 1 or len(without_autocast) > 1\n",
        "        return False\n",
        "tests/test_capture.py tests/test_canonical.py",
    ),
    "gate: integer and fp64 tensors are taken": Mutation(
        "fusion_backend/decide/legality.py",
        "        if v.dtype not in FLOATS if exact is None else v.dtype != exact:\n",
        "        if False:\n",
        "tests/test_every_pattern.py::test_refused_tensors_fall_through",
    ),
    "gate: the strides of the result are not compared": Mutation(
        "fusion_backend/decide/call.py",
        "    return tuple(i for i, root, out in read if needs_copy(root, out, writers))\n",
        "    return ()\n",
        "tests/test_every_pattern.py::test_permuted_and_expanded_inputs",
    ),
    "rewrite: two results of an op change places": Mutation(
        "fusion_backend/rewrite/writer.py",
        "        return self.new, dict(zip(roots, results, strict=True))\n",
        "        return self.new, dict(zip(roots, results[::-1], strict=True))\n",
        "tests/test_every_pattern.py::test_rewritten_graph_with_kernels_agrees",
    ),
    "rewrite: older names of a converted in-place chain keep the old value": Mutation(
        "fusion_backend/rewrite/writer.py",
        "            self.repoint(d, dynamo, atens)\n",
        "",
        "tests/test_rewrite.py tests/oracle/test_inplace.py",
    ),
    "functional: code of two regions becomes one chain": Mutation(
        "fusion_backend/capture/functionalize.py",
        "    if view.region.get(maker) != view.region.get(n):\n",
        "    if False:\n",
        "tests/test_rewrite.py tests/oracle/test_inplace.py",
    ),
    "autocast: the casts are not written": Mutation(
        "fusion_backend/capture/autocast.py",
        "            write_casts(view, n, leaves, spec, values, casts)\n",
        "            pass\n",
        "tests/test_capture.py",
    ),
    "autocast: an operator that it changes is no fence": Mutation(
        "fusion_backend/capture/autocast.py",
        "            fences.add(n)\n",
        "            pass\n",
        "tests/test_capture.py",
    ),
    "expressions: x - y is read as x + y": Mutation(
        "fusion_backend/ir/builder.py",
        "        return self.const(-x.attr) if is_const(x) else self.mul(x, self.const(-1.0), "
        "shape)\n",
        "        return x\n",
        "tests/graphs",
    ),
    "composites: where(not m, x, y) keeps x and y": Mutation(
        "fusion_backend/ir/rules_pointwise.py",
        "        mask, x, y = mask.args[0], y, x\n",
        "        mask, x, y = mask.args[0], x, y\n",
        "tests/test_canonical.py tests/test_attention_forms.py",
    ),
    "template: a scalar is not traced twice": Mutation(
        "fusion_backend/match/templates.py",
        "    if repr(roots) != repr(second[0]):\n",
        "    if False:\n",
        "tests/test_user_pattern.py",
    ),
    "op: the gradient of the reference ignores the incoming one": Mutation(
        "fusion_backend/ops/operator.py",
        "[g for _, g in pairs],\n                    allow_unused",
        "[torch.ones_like(g) for _, g in pairs],\n                    allow_unused",
        "tests/test_backend.py",
    ),
    "op: a seed of its own in the backward": Mutation(
        "fusion_backend/ops/operator.py",
        "            inputs = [a.view_as(a) if need else a for a, need in zip(flat, needs, "
        "strict=True)]\n",
        "            inputs = [a.view_as(a) if need else a for a, need in zip(flat, needs, "
        "strict=True)]\n"
        "            inputs[-1:] = [draw(i.device) if self.op.seed_arguments else i for i in "
        "inputs[-1:]]\n",
        "tests/test_dropout.py::test_compiled_value_and_gradients",
    ),
    "masks: every mask counts as square": Mutation(
        "fusion_backend/masks/analysis.py",
        "found.square = val.dim() > 1 and statically_known_true(val.shape[-2] == val.shape[-1])",
        "found.square = True",
        "tests/test_masks.py tests/test_attention.py",
    ),
    "cache: the patterns are not in the key": Mutation(
        "fusion_backend/cache/identity.py",
        "repr((sources, [f.digest for f in prints], decisions))",
        "repr((sources, decisions))",
        "tests/oracle/test_second_process_cache.py::test_edited_backward",
    ),
    "regions: a library call does not end one": Mutation(
        "fusion_backend/measure/region.py",
        "return library_call(name_of(n)) or not measurable(n)",
        "return not measurable(n)",
        "tests/test_regions.py",
    ),
    "measuring: an index may be out of range": Mutation(
        "fusion_backend/measure/inputs.py",
        "memory.random_(0, max(1, min(bounds)))",
        "memory.random_(0, 1000)",
        "tests/test_measured_regions.py",
    ),
    "measuring: wrong results are not noticed": Mutation(
        "fusion_backend/measure/contest.py",
        "if not self.random and (wrong :=",
        "if False and (wrong :=",
        "tests/test_measured_regions.py",
    ),
    "measuring: noise is taken for a difference": Mutation(
        "fusion_backend/measure/timing.py",
        "CONFIDENCE = 0.99",
        "CONFIDENCE = 0.6",
        "tests/test_race.py",
    ),
    "judge: what the tables refuse is fused when the rounds run out": Mutation(
        "fusion_backend/measure/judge.py",
        "gate.evidence.wanted = active and number + 1 < MOST_ROUNDS",
        "gate.evidence.wanted = active",
        "tests/test_measured_gate.py",
    ),
    "regions: what reads a value later is left out": Mutation(
        "fusion_backend/measure/region.py",
        "nodes = sorted(found | again | beside | later, key=",
        "nodes = sorted(found | again | beside, key=",
        "tests/test_regions.py",
    ),
    "regions: what a product copies is not counted": Mutation(
        "fusion_backend/measure/cut.py",
        "rows = [n for n in outside if copying[n]]",
        "rows = []",
        "tests/test_regions.py",
    ),
    "judge: beside a product that lost, a site is taken without a measurement": Mutation(
        "fusion_backend/measure/judge.py",
        " and id(d) not in again:",
        ":",
        "tests/test_measured_order.py",
    ),
    "judge: what nobody has judged is fused": Mutation(
        "fusion_backend/measure/judge.py",
        'gate.evidence.record(d.match, Measured("", d.doubt.reason))',
        'gate.evidence.record(d.match, Measured(d.providers, ""))',
        "tests/test_measured_gate.py",
    ),
    "judge: what was not measured has lost": Mutation(
        "fusion_backend/decide/evidence.py",
        "answer.certain and answer.take",
        "answer.take",
        "tests/test_measured_order.py",
    ),
    "in memory: a wider value than that of the cast": Mutation(
        "fusion_backend/rewrite/in_memory.py",
        "not views(at) and at.meta[",
        "False and at.meta[",
        "tests/test_in_memory.py",
    ),
    "in memory: views are computed": Mutation(
        "fusion_backend/rewrite/in_memory.py",
        "if views(n) or elements(n) <= own:",
        "if elements(n) <= own:",
        "tests/test_in_memory.py",
    ),
    "in memory: sums of it count": Mutation(
        "fusion_backend/rewrite/in_memory.py",
        "if n in seen or not elementwise(n):",
        "if n in seen:",
        "tests/test_in_memory.py",
    ),
    "in memory: of one kernel each reader counts": Mutation(
        "fusion_backend/rewrite/in_memory.py",
        "last.add(end(n))",
        "last.add(n)",
        "tests/test_in_memory.py",
    ),
    "in memory: a sum under it does not matter": Mutation(
        "fusion_backend/rewrite/in_memory.py",
        " and not reduced(value):",
        ":",
        "tests/test_in_memory.py",
    ),
    "in memory: a value with another argument is kept": Mutation(
        "fusion_backend/rewrite/in_memory.py",
        " and len(at.all_input_nodes) == 1",
        "",
        "tests/test_in_memory.py",
    ),
    "in memory: a result is written twice": Mutation(
        "fusion_backend/rewrite/in_memory.py",
        "large and not result and",
        "large and",
        "tests/test_in_memory.py",
    ),
    "in memory: nobody reads it there": Mutation(
        "fusion_backend/compat/torch.py",
        "    n.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)\n",
        "",
        "tests/test_in_memory.py",
    ),
    "judge: beside a product that lost all sites are tried": Mutation(
        "fusion_backend/measure/measuring.py",
        "if not (products and self.lost):",
        "if True:",
        "tests/test_measured_order.py",
    ),
    "judge: beside a product that won no others are tried": Mutation(
        "fusion_backend/measure/measuring.py",
        "if not (products and self.lost):",
        "if not products:",
        "tests/test_measured_order.py",
    ),
    "judge: half of a gate that lost is tried": Mutation(
        "fusion_backend/measure/lost.py",
        "if same or between or half:",
        "if same or between:",
        "tests/test_measured_order.py",
    ),
    "judge: half of a gate that failed is not tried": Mutation(
        "fusion_backend/measure/lost.py",
        "gate.evidence.beaten(larger.match)",
        "True",
        "tests/test_measured_order.py",
    ),
    "judge: what a view of it is read by does not count": Mutation(
        "fusion_backend/measure/lost.py",
        "pending += [u for u in n.users if u in inside]",
        "pass",
        "tests/test_measured_order.py",
    ),
    "store: an answer may be read while it is written": Mutation(
        "fusion_backend/measure/store.py",
        'os.replace(scratch, self.folder / f"{answer.key}.json")',
        '(self.folder / f"{answer.key}.json").write_text(answer.to_json())',
        "tests/test_measured_store.py",
    ),
    "ranks: each takes its own answer": Mutation(
        "fusion_backend/measure/agree.py",
        'return answer if self.store is None else self.first(f"fusion/answer/{key}", answer)',
        "return answer",
        "tests/test_measured_regions.py",
    ),
    "explain: what a subclass holds beside tensors is taken for one": Mutation(
        "fusion_backend/frontends/run_unchanged.py",
        "pending += [held for held in inside if isinstance(held, torch.Tensor)]",
        "pending += inside",
        "tests/test_run_unchanged.py",
    ),
    "sums: two shots over four ranks from 256 KB": Mutation(
        "fusion_backend/kernels/collective/size_gate.py",
        "TWO_SHOTS_FROM: dict[int, int] = {4: 1 << 20,",
        "TWO_SHOTS_FROM: dict[int, int] = {4: 1 << 18,",
        "tests/test_benchmark_distributed.py::"
        "test_the_ratio_of_a_sum_is_that_of_the_kernel_that_is_taken",
    ),
    "legality: an argument may come too late": Mutation(
        "fusion_backend/decide/legality.py",
        "if self.order[a] > first_root:",
        "if self.order[a] < 0:",
        "tests/test_overlaps.py",
    ),
    "claims: the line of what a larger site reads is left out": Mutation(
        "fusion_backend/decide/claims.py",
        "inside it, at {location(n)}, is read by",
        "inside it is read by",
        "tests/test_casts_between_sites.py",
    ),
    "decoding: every rank has the first part of the cache": Mutation(
        "benchmarks/rank_runs/decoding.py",
        "kept.chunk(ranks, dim=1)[rank].contiguous()",
        "kept.chunk(ranks, dim=1)[0].contiguous()",
        "tests/test_benchmark_tensor_parallel.py",
    ),
    "allowance: one graph takes all of the time": Mutation(
        "fusion_backend/measure/allowance.py",
        "enough = of_graph > 0 and left",
        "enough = left",
        "tests/test_measured_order.py::test_a_graph_may_take_a_part_of_the_time",
    ),
    "together: a rank outside of the group counts": Mutation(
        "fusion_backend/frontends/together.py",
        "failures = [r for r in found.ranks if",
        "failures = [r for r in range(8) if",
        "tests/test_together.py",
    ),
}
