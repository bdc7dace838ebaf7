"""Which rank of which launch a process is, by its environment."""

import pytest

from p2pckpt.errors import UsageError
from p2pckpt.launch import Launch


def test_torchrun_and_slurm_and_neither():
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "a", "MASTER_PORT": "1"}
    found = Launch.find(torchrun)
    assert (found.rank, found.world_size) == (3, 8)
    again = Launch.find({**torchrun, "RANK": "4"})
    assert again.run_token == found.run_token
    restarted = Launch.find({**torchrun, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert restarted.run_token != found.run_token
    slurm = Launch.find({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "77"})
    assert (slurm.rank, slurm.world_size) == (1, 2)
    alone = Launch.find({})
    assert (alone.rank, alone.world_size) == (0, 1)
    assert alone.run_token != Launch.find({}).run_token


@pytest.mark.parametrize("wrong", ["", "x", "-1", "1.5"])
def test_what_is_no_number_is_named(wrong):
    with pytest.raises(UsageError, match="RANK="):
        Launch.find({"RANK": wrong, "WORLD_SIZE": "2"})
