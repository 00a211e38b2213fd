"""Traces: the columns of a run, reading and writing, importers, and the synthetic generator.

=====================  ========================================================================
``trace``              :class:`~rlhfless.traces.trace.Trace`, one row a response, and
                       :class:`~rlhfless.traces.trace.RunLog`, what a console log records of a step
``files``              Parquet, CSV and JSON Lines in and out; stage tables
``verl_log``           verl console logs, to a ``RunLog``
``reconstruct``        a ``RunLog`` to a ``Trace`` that meets its length figures exactly
``verl_rollouts``      verl rollout dumps, to a ``Trace``
``polytrace``          PolyTrace-style tables, to a ``Trace``
``synthetic``          parameters and generator of synthetic traces; presets stand in ``conf/trace/``
``lengths``            distributions and correlations that ``reconstruct`` and ``synthetic`` share
``errors``             the one exception that user input can raise
=====================  ========================================================================

A trace looks like this:

>>> from rlhfless.traces.synthetic import LengthComponent, Synthetic, generate
>>> params = Synthetic(
...     name="tiny", prompts=8, prompts_per_step=4, responses_per_prompt=2, epochs=2,
...     max_response_tokens=512, lengths=(LengthComponent(1.0, 200.0, 0.5),), icc=0.5,
...     question_median_tokens=60.0, question_log_sd=0.3, max_prompt_tokens=256,
... )
>>> trace = generate(params, seed=0)
>>> len(trace), trace.steps.tolist()
(32, [0, 1, 2, 3])
"""
