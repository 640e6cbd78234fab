"""A GGUF file as a model folder, for libraries that read no GGUF."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from surge_beam.gpu.encoder import files_identity
from surge_beam.gpu.gguf_file import GgufFile
from surge_beam.gpu.text_tokenizer import gguf_tokenizer
from surge_beam.gpu.user_cache import cache_folder
from surge_beam.records import SurgeError


def folder_of_gguf(path: Path) -> Path:
    """A folder with the same model as config.json, safetensors and tokenizer.

    It is made once, below the user's cache folder, under a digest of the file; weights are
    float32, as they come out of the file's own format.

    Raises:
      SurgeError: if the file cannot be read, or describes a model that is not known.
    """
    cache = cache_folder()
    folder = cache / f"gguf-{files_identity(str(path))}"
    if folder.is_dir():
        return folder
    import torch
    from transformers import AutoModelForCausalLM

    file = GgufFile(path)
    cache.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="making-", dir=cache))
    try:
        read = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
        # a config without what transformers notes about the format it came from
        model = AutoModelForCausalLM.from_config(file.config(), dtype=torch.float32)
        model.load_state_dict(read.state_dict())
        model.save_pretrained(made)
        gguf_tokenizer(path, adds_bos=file.adds_bos).save_pretrained(made)
        os.rename(made, folder)
    except OSError:
        # another process was first, or there is no room
        if not folder.is_dir():
            raise
    except Exception as error:
        raise SurgeError(f"{path} cannot be made a model folder: {error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder
