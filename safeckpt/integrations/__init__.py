"""Trainers that keep their own loop: each module here makes one of them save and resume with safeckpt.

======================  =================================  =======================
module                  for                                install
======================  =================================  =======================
`lightning`             Lightning's `Trainer`              `safeckpt[lightning]`
`transformers`          Hugging Face's `Trainer`           `safeckpt[transformers]`
`accelerate`            loops with an `Accelerator`        `safeckpt[accelerate]`
`ignite`                Ignite's `Engine`                  `safeckpt[ignite]`
======================  =================================  =======================

A module is imported by its own name, `from safeckpt.integrations import lightning`, and imports its trainer. Without
the trainer, or with a version that was not tested, that is an ImportError which says what to install.

The modules use only the public names of `safeckpt`, as an integration outside of this package would. What they rely on
in a trainer beyond its documentation is looked for when they are put to use: a trainer that has lost it is refused, and
nothing is trained. `requirements` has both checks.
"""
