"""The cases, by kind."""

from tests.fuzz.case import Case
from tests.fuzz.kinds import damaged, folders, lines, looks, models, names, processes, texts

# What each kind is about
KINDS = {
    "damage": "a damaged file is not sound: the same result, or an error that names a whole file",
    "overwrite": "no tool writes over what is not its own",
    "init-names": "--init keeps a classifier for the same classes alone",
    "modules": "every module that is a tool runs as one",
    "counts": "operations are counted, the scan's too",
    "folders": "folders of images as people have them: no image is lost or counted twice without a word",
    "launcher": "what accelerate takes from its environment is honoured, noted or refused",
    "clock": "neither a clock that went back nor a resume from an earlier checkpoint loses what was written",
    "index": "an index of shards is checked where it is read",
    "sixteen-bit": "a 16-bit picture that comes out black is noted",
    "erasing": "boxes are erased as they were drawn",
    "model-kwargs": "arguments of models that cannot be, in one line",
    "hub-folders": "model folders that are cut short or hold nonsense",
    "words": "optimisers, augmentation and empty strings",
    "terminals": "terminals without UTF-8, and names that need it",
    "second-main": "a second main() in a process, and one in a thread",
    "ranks": "where one of several processes fails, one error is told",
    "reasons": "why a shard cannot be read, in words",
    "labels": "samples whose label is in the tar under another name: what is there",
    "tars": "sound tars of other compressions",
    "shard-folders": "shards in folders of splits",
    "splits": "a split that is not there: which ones are",
    "verify": "shards to be verified that are not there",
    "full-disk": "a full disk: which file",
    "index-text": "an index that is no text",
    "others": "checkpoints that others wrote",
    "hub-forms": "model folders for every tool, and what is in them",
    "docs": "what the docs write works",
    "wheel": "what a wheel is and holds",
    "libraries": "what other libraries do with our models",
    "asked": "what users ask for works, or the docs say no",
    "tensorboard": "what TensorBoard shows",
    "seeds": "plots and tables of two seeds stay within 0 and 100",
    "arrows": "maps of models that read columns say so",
    "lines": "command lines drawn from the options",
}


def all_cases(seed: int) -> list[Case]:
    """All cases, in their order. Which there are does not depend on the seed, what they draw does."""
    found: list[Case] = []
    for module in damaged, names, folders, models, processes, texts, looks, lines:
        found += module.cases()
    names_of = [case.name for case in found]
    if twice := {name for name in names_of if names_of.count(name) > 1}:
        raise ValueError(f"several cases are called {', '.join(sorted(twice))}")
    if unknown := {case.kind for case in found} - KINDS.keys():
        raise ValueError(f"kinds that are not described: {', '.join(sorted(unknown))}")
    return found
